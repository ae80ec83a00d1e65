"""Record the golden set anew: `python -m tests.golden`. Say in the changelog why it differs."""

from tests.golden.record import write_all
from tests.postgres.server import stop_server

if __name__ == "__main__":
    try:
        write_all()
    finally:
        stop_server()

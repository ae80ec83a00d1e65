"""Settings: one frozen value. Defaults stand here and nowhere else; file < environment < arguments."""

import tomllib
from typing import Any, Self

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    PyprojectTomlConfigSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from postbus.errors import InvalidRequest
from postbus.retry import RetryPolicy

__all__ = ["Settings"]


class Settings(BaseSettings):
    """How a bus runs. Times are seconds. Read from `postbus.toml` or `[tool.postbus]`, and `POSTBUS_*` variables."""

    model_config = SettingsConfigDict(
        env_prefix="POSTBUS_",
        env_nested_delimiter="__",
        frozen=True,
        extra="forbid",
        toml_file="postbus.toml",
        pyproject_toml_table_header=("tool", "postbus"),
    )

    url: str = Field(default="sqlite:///postbus.db", repr=False)
    direct_url: str | None = Field(default=None, repr=False)
    """PostgreSQL behind a transaction pooler: `url` leads to the pooler, this one past it, for listening."""
    token: SecretStr | None = Field(default=None, repr=False)
    """What a server at http:// or https:// asks for; see `postbus token`."""
    listen: bool = True
    """PostgreSQL: be woken by LISTEN/NOTIFY. Without it, others' events are noticed by polling only."""
    worker_id: str | None = Field(default=None, min_length=1, max_length=255)
    """None: `{hostname}:{pid}`."""
    lease: float = Field(default=60, ge=0.1)
    poll_interval: float = Field(default=1, gt=0)
    concurrency: int = Field(default=10, ge=1, le=10_000)
    prefetch: int | None = Field(default=None, ge=1, le=100_000)
    """How many deliveries a worker holds at most; None: what it can start within half a second."""
    shutdown_timeout: float = Field(default=30, ge=0)
    auto_migrate: bool = True
    retry: RetryPolicy = RetryPolicy()

    @classmethod
    def load(cls, **given: Any) -> Self:
        """Return the settings with what is given (and is not None) laid over file and environment.

        Raises InvalidRequest that names every setting that is unknown or out of range.
        """
        try:
            return cls(**{name: value for name, value in given.items() if value is not None})
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"postbus.toml or pyproject.toml is not TOML: {error}") from None
        except SettingsError as error:
            raise InvalidRequest(f"wrong settings: {error}") from None
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
            raise InvalidRequest(f"wrong settings: {wrong}") from None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read arguments, then the environment, then the file in the working directory."""
        del dotenv_settings, file_secret_settings
        files = TomlConfigSettingsSource(settings_cls), PyprojectTomlConfigSettingsSource(settings_cls)
        return init_settings, env_settings, *files

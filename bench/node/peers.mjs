// The peers of postbus that live on Node, each in its own words and at its best documented settings.
// `BENCH_URL=postgresql://… node peers.mjs graphile.drain '{"count": 1000}'` prints its figures as one line of JSON.

import { spawn } from "node:child_process";
import { once } from "node:events";
import { fileURLToPath } from "node:url";
import { setTimeout as sleep } from "node:timers/promises";

const TYPE = "order.placed";
const BATCH = 1000;
const WARM_UP = 20;
const RATE = 50;

// As bench/load.py has it: the same bytes for everybody.
const order = (number) => ({
  order_id: number,
  customer: `customer-${String(number % 997).padStart(4, "0")}`,
  email: "someone@example.org",
  items: [
    { sku: "A-1001", quantity: 2 },
    { sku: "B-2002", quantity: 1 },
  ],
  total: 59.9,
});

// Each opens with what its documentation names for throughput; `add` stores many at once, `work` runs a handler on each
// and resolves with what stops the worker, once all that was handled is settled.
const peers = {
  // https://worker.graphile.org/docs/performance: that preset, with a longer local queue, which is faster here.
  async graphile(url) {
    const { Logger, makeWorkerUtils, run } = await import("graphile-worker");
    const preset = {
      worker: {
        connectionString: url,
        concurrentJobs: 24,
        maxPoolSize: 25,
        localQueue: { size: 2000 },
        completeJobBatchDelay: 0,
        failJobBatchDelay: 0,
        logger: new Logger(() => (level, message) => level === "error" && console.error(message)),
      },
    };
    const utils = await makeWorkerUtils({ preset });
    await utils.migrate();
    return {
      add: (payloads) => utils.addJobs(payloads.map((payload) => ({ identifier: TYPE, payload }))),
      async work(handle) {
        const runner = await run({ preset, taskList: { [TYPE]: (payload) => handle(payload) }, noHandleSignals: true });
        return () => runner.stop();
      },
      left: async () => {
        const { rows } = await utils.withPgClient((client) => client.query("SELECT count(*)::int AS n FROM graphile_worker.jobs"));
        return rows[0].n;
      },
      close: () => utils.release(),
    };
  },

  // https://pgboss.io: fetching in batches, without a pause while they come back full, woken by NOTIFY.
  async pgboss(url) {
    const { PgBoss } = await import("pg-boss");
    const boss = new PgBoss({ connectionString: url, useListenNotify: true, supervise: false, schedule: false });
    boss.on("error", console.error);
    await boss.start();
    await boss.createQueue(TYPE, { notify: true });
    return {
      add: (payloads) => boss.insert(TYPE, payloads.map((data) => ({ data }))),
      async work(handle) {
        const options = { batchSize: BATCH, burstWhenBatchFull: true, pollingIntervalSeconds: 0.5, localConcurrency: 4 };
        await boss.work(TYPE, options, async (jobs) => {
          for (const job of jobs) handle(job.data);
        });
        return () => boss.offWork(TYPE, { wait: true });
      },
      left: async () => {
        const { rows } = await boss.getDb().executeSql("SELECT count(*)::int AS n FROM pgboss.job WHERE state <> 'completed'");
        return rows[0].n;
      },
      close: () => boss.stop({ graceful: false }),
    };
  },
};

const measures = {
  async publish(peer, { batches, size }) {
    const given = Array.from({ length: batches + 1 }, () => Array.from({ length: size }, (_, number) => order(number)));
    await peer.add(given.pop());
    const began = performance.now();
    for (const batch of given) await peer.add(batch);
    return { rate: (batches * size) / seconds(began) };
  },

  async drain(peer, { count }) {
    for (let start = 0; start < count; start += BATCH)
      await peer.add(Array.from({ length: Math.min(BATCH, count - start) }, (_, number) => order(start + number)));
    let handled = 0;
    const finished = Promise.withResolvers();
    const began = performance.now();
    const stop = await peer.work(() => {
      if (++handled === count) finished.resolve();
    });
    await finished.promise;
    await stop();
    const took = seconds(began);
    const left = await peer.left();
    if (left || handled !== count) throw new Error(`handled ${handled} of ${count}, and ${left} are left`);
    return { rate: count / took };
  },

  async dispatch(peer, { count }) {
    const took = [];
    const finished = Promise.withResolvers();
    const stop = await peer.work((payload) => {
      took.push(Number(process.hrtime.bigint() - BigInt(payload.at)) / 1e9);
      if (took.length === count + WARM_UP) finished.resolve();
    });
    const arguments_ = [fileURLToPath(import.meta.url), `${name}.paced`, JSON.stringify({ count: count + WARM_UP })];
    const publisher = spawn(process.execPath, arguments_, { stdio: ["ignore", "ignore", "inherit"] });
    const [[code]] = await Promise.all([once(publisher, "exit"), finished.promise]);
    await stop();
    if (code) throw new Error(`the publisher ended with code ${code}`);
    const ordered = took.slice(WARM_UP).sort((one, other) => one - other);
    const at = (part) => ordered[Math.floor(ordered.length * part)];
    return { p50: at(0.5), p99: at(0.99), max: ordered.at(-1) };
  },

  async paced(peer, { count }) {
    for (let number = 0; number < count; number++) {
      await sleep((0.5 + Math.random()) * (1000 / RATE));
      await peer.add([{ at: String(process.hrtime.bigint()), ...order(number) }]);
    }
    return {};
  },
};

const seconds = (began) => (performance.now() - began) / 1000;

const [, , target, given] = process.argv;
const [name, measure] = target.split(".");
const peer = await peers[name](process.env.BENCH_URL);
const figures = await measures[measure](peer, JSON.parse(given));
console.log(JSON.stringify(figures));
await peer.close();
process.exit(0);

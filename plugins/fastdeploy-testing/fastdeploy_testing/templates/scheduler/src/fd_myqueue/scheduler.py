"""The servers of one host share a queue of requests: an SQLite file in a folder."""

from __future__ import annotations

import functools
import secrets
import sqlite3
import threading
import time
from dataclasses import replace
from typing import Any

from msgspec.msgpack import decode, encode

from fastdeploy_core import types
from fastdeploy_core.contracts.scheduler import InstanceLoad, SchedulerCapabilities
from fastdeploy_core.errors import ConfigError

LOST = "the instance that ran this request was lost"
SCHEMA = """
PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;  -- survives processes; FULL: power cuts, too
CREATE TABLE IF NOT EXISTS requests (n INTEGER PRIMARY KEY, id TEXT UNIQUE, front TEXT, owner TEXT,
  attempt INT, position INT, size INT, priority INT, put_s REAL, until_s REAL, body BLOB);
CREATE TABLE IF NOT EXISTS outputs (n INTEGER PRIMARY KEY, front TEXT, at_s REAL, body BLOB);
CREATE TABLE IF NOT EXISTS aborts (owner TEXT, id TEXT, at_s REAL);  -- owner '': it came early
CREATE TABLE IF NOT EXISTS instances (name TEXT PRIMARY KEY, epoch INT, seen_s REAL, report BLOB);
"""
now = time.monotonic  # of the host: one clock for all its processes


def atomic(method: Any) -> Any:
    """One transaction: a process that dies in it has changed nothing."""

    @functools.wraps(method)
    def run(self: Any, *values: Any) -> Any:
        with self.lock, self.db:  # ends the transaction
            self.db.execute("BEGIN IMMEDIATE")
            return method(self, *values)

    return run


def poll(ask: Any, timeout_s: float) -> Any:
    until_s = now() + timeout_s
    while not (found := ask()) and now() < until_s:
        time.sleep(0.005)
    return found


class MyQueueScheduler:
    """See contracts.scheduler.RequestScheduler; options: folder, topic."""

    name = "myqueue"
    contract = (1, 0)
    capabilities = SchedulerCapabilities(shared_queue=True, leases=True, durable=True)

    def __init__(self, config: Any) -> None:
        options = {"topic": "default", **(config.options or {})}
        if set(options) != {"topic", "folder"}:
            raise ConfigError(f"myqueue needs folder and may have topic, got {', '.join(options)}")
        self.config, self.lock, self.is_closed = config, threading.RLock(), False
        self.me, self.front = config.instance or secrets.token_hex(8), secrets.token_hex(8)
        self.epoch, self.has_entered = config.epoch or secrets.randbits(62), False
        self.load = InstanceLoad(self.me, self.epoch)
        file = f"{options['folder']}/{options['topic']}.sqlite"
        self.db = sqlite3.connect(file, 30, isolation_level=None, check_same_thread=False)
        self.db.row_factory = sqlite3.Row
        self.db.executescript(SCHEMA)

    def do(self, sql: str, *values: Any) -> list[Any]:
        return self.db.execute(sql, values).fetchall()

    def end(self, error: str | None, kind: str, where: str, *values: Any) -> list[Any]:
        """End requests with a last delta that no engine made."""
        for r in (rows := self.do(f"DELETE FROM requests WHERE {where} RETURNING *", *values)):
            if r["owner"]:
                self.do("INSERT INTO aborts VALUES (?,?,?)", r["owner"], r["id"], now())
            why = types.FinishReason.ABORT if error is None else types.FinishReason.ERROR
            count = decode(r["body"], type=types.Request).sampling.n
            ends = [types.SequenceDelta(index=i, finish_reason=why) for i in range(count)]
            last = types.RequestOutputDelta(
                request_id=r["id"], position=r["position"], attempt=r["attempt"], sequences=ends,
                finished=True, error=error, error_type=kind)  # fmt: skip
            self.show(r["front"], last)
        return rows

    def show(self, front: str, delta: Any) -> None:
        if front:  # else nobody reads it
            sql = "INSERT INTO outputs (front, at_s, body) VALUES (?,?,?)"
            self.do(sql, front, now(), encode(delta))

    def enter(self) -> bool:
        """Renew the lease; False: a newer engine of this name has taken over."""
        others = self.do("SELECT 1 FROM instances WHERE name=? AND epoch<>?", self.me, self.epoch)
        if others and self.has_entered:
            return False
        if others:
            self.give_back(self.me)
        self.has_entered, values = True, (self.me, self.epoch, now(), encode(self.load))
        self.do("REPLACE INTO instances VALUES (?,?,?,?)", *values)
        return True

    def give_back(self, owner: str) -> None:
        self.end(LOST, "WorkerError", "owner=? AND position>0", owner)  # what was shown is shown
        self.do("UPDATE requests SET owner='' WHERE owner=?", owner)
        self.do("DELETE FROM instances WHERE name=?", owner)

    def sweep(self) -> None:
        lease_s, ttl_s = self.config.lease_s, self.config.ttl_s
        # A time to come is of before the host was started anew.
        is_dead = "seen_s NOT BETWEEN ? AND ?"
        for r in self.do(f"SELECT * FROM instances WHERE {is_dead}", now() - lease_s, now()):
            self.give_back(r["name"])
        self.end("it waited too long", "RequestTimeout", "owner='' AND until_s<?", now())
        self.do("DELETE FROM outputs WHERE at_s<?", now() - ttl_s)  # its reader has died
        self.do("DELETE FROM aborts WHERE at_s<?", now() - ttl_s)

    @atomic
    def put_requests(self, requests: Any) -> list[str | None]:
        return [self.put(request) for request in requests]

    def put(self, request: Any) -> str | None:
        name, size, c = request.request_id, len(request.prompt_token_ids), self.config
        num, tokens = self.do("SELECT count(*), total(size) FROM requests WHERE owner=''")[0]
        if num and (num >= c.max_size > 0 or tokens + size > c.max_tokens > 0):
            return f"queue full: {num} requests wait; try again later"
        # Without its front end it starts anew; the attempt goes on, which fences the old run off.
        before = self.end(None, "", "id=? AND front=''", name)
        wait_s = c.ttl_s if request.deadline_s is None else min(c.ttl_s, request.deadline_s)
        row = self.do(
            "INSERT OR IGNORE INTO requests VALUES (NULL,?,?,'',?,0,?,?,?,?,?) RETURNING n", name,
            self.front, before[0]["attempt"] if before else 0, size, request.priority, now(),
            now() + wait_s, encode(request))  # fmt: skip
        if row and self.do("DELETE FROM aborts WHERE owner='' AND id=? RETURNING 1", name):
            self.end(None, "", "id=?", name)
        return None if row else f"duplicate request id: {name!r:.80} is unfinished"

    def get_requests(self, capacity: Any, timeout_s: float = 0.0) -> list[Any]:
        return poll(lambda: self.take(capacity), timeout_s)

    @atomic
    def take(self, capacity: Any) -> list[Any]:
        self.sweep()
        # An id that must be stopped here is not handed out again before that was heard.
        rows = self.do("SELECT * FROM requests WHERE owner='' AND id NOT IN (SELECT id FROM aborts "
                       "WHERE owner=?) ORDER BY priority, n LIMIT ?", self.me,
                       capacity.num_requests if self.enter() else 0)  # fmt: skip
        blocks, tokens, taken = capacity.num_free_blocks, capacity.num_tokens, []
        for r in rows:
            need, tokens = r["size"] // capacity.block_size + 1, tokens - r["size"]
            if tokens < 0 or (need > blocks and not 0 < self.load.num_total_blocks < need):
                break  # one that can never run is handed out: its engine says so to the client
            blocks -= need
            self.do("UPDATE requests SET owner=?, attempt=attempt+1 WHERE n=?", self.me, r["n"])
            taken.append(request := decode(r["body"], type=types.Request))
            request.attempt = r["attempt"] + 1
            if request.deadline_s is not None:
                request.deadline_s = max(0.0, r["put_s"] + request.deadline_s - now())
        return taken

    @atomic
    def put_results(self, outputs: Any) -> None:
        self.enter()
        for d in types.each_delta(outputs):
            known = "id=? AND attempt=? AND owner<>''"
            self.end("output was lost", "FastDeployError", f"{known} AND position<?",
                     d.request_id, d.attempt, d.position)  # fmt: skip
            for r in self.do(f"UPDATE requests SET position=position+1 WHERE {known} AND position=?"
                             " RETURNING *", d.request_id, d.attempt, d.position):  # fmt: skip
                self.show(r["front"], d)
                self.do("DELETE FROM requests WHERE n=? AND ?", r["n"], d.finished)

    def get_results(self, timeout_s: float = 0.0) -> list[Any]:
        return poll(self.fetch, timeout_s)

    @atomic
    def fetch(self) -> list[Any]:
        self.sweep()
        rows = self.do("DELETE FROM outputs WHERE front=? RETURNING n, body", self.front)
        return [decode(body, type=types.RequestOutputDelta) for _, body in sorted(map(tuple, rows))]

    @atomic
    def abort(self, request_ids: Any) -> None:
        for name in request_ids:
            whole, branch = types.split_branch_id(name)
            rows = self.do("SELECT owner FROM requests WHERE id=?", whole)
            if branch is None and rows:
                self.end(None, "", "id=?", whole)
            elif rows or branch is None:  # a branch goes to its engine; what is unknown comes early
                owner = rows[0]["owner"] if rows else ""
                self.do("INSERT INTO aborts VALUES (?,?,?)", owner, name, now())

    @atomic
    def get_aborts(self) -> list[str]:
        return [r["id"] for r in self.do("DELETE FROM aborts WHERE owner=? RETURNING id", self.me)]

    @atomic
    def report_load(self, load: Any) -> None:
        self.load = load
        self.enter()

    @atomic
    def loads(self) -> list[InstanceLoad]:
        self.sweep()
        rows = self.do("SELECT report, seen_s FROM instances")
        found = [(decode(report, type=InstanceLoad), seen_s) for report, seen_s in rows]
        return [replace(load, age_s=now() - seen_s) for load, seen_s in found]

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.leave()
            self.db.close()

    @atomic
    def leave(self) -> None:
        self.give_back(self.me)
        self.do("UPDATE requests SET front='' WHERE front=?", self.front)

"""The options of `fastdeploy router`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from fastdeploy_core.contracts.command import CommandParser
from fastdeploy_core.errors import ConfigError

from .cached.follower import Publisher
from .policies import DEFAULT_POLICY, POLICIES
from .roles.controller import Goals


@dataclass(frozen=True, slots=True)
class Keys:
    """Bearer keys; empty: none."""

    own: str = ""  # clients send it
    admin: str = ""  # for /admin; without it these routes do not exist
    instances: str = ""  # sent to instances in place of the client's


@dataclass(frozen=True, slots=True)
class PrefillOptions:
    """Instances that compute prompts for the others; none: prefill and decode are not apart."""

    instances: tuple[str, ...] = ()  # base URLs
    policy: str = DEFAULT_POLICY
    min_tokens: int = 256  # of a prompt, estimated; a shorter one is computed where it is answered
    timeout_s: float = 60.0  # of an instance that does not answer


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds."""

    probe_interval_s: float = 1.0
    probe_timeout_s: float = 2.0
    answer_timeout_s: float = 600.0  # the longest silence of an instance within an answer
    drain_timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """What the command line says."""

    instances: tuple[str, ...]  # base URLs
    policy: str = DEFAULT_POLICY
    host: str = "127.0.0.1"
    port: int = 8100
    keys: Keys = Keys()
    max_body_bytes: int = 16 * 2**20
    max_retries: int = 2  # other instances tried for a request that has shown nothing
    timing: Timing = Timing()
    kv_events: tuple[Publisher, ...] = ()  # of each instance those of its engines
    prefill: PrefillOptions = PrefillOptions()
    goals: Goals | None = None  # None: roles are left as they are


def parse(arguments: Sequence[str]) -> RouterOptions:
    """Options from the words after `fastdeploy router`; ConfigError for what cannot work."""
    given = _parser().parse_args(arguments)
    urls, prefill_urls = _base_urls(given.instances), _base_urls(given.prefill)
    if not urls:
        raise ConfigError("--instances names no instance; give one URL or more")
    if len(set(urls)) < len(urls):
        raise ConfigError(f"--instances names one twice: {', '.join(urls)}")
    if both := set(urls) & set(prefill_urls) or len(set(prefill_urls)) < len(prefill_urls):
        raise ConfigError(
            f"--prefill names an instance twice, or one of --instances: {both or prefill_urls}"
        )
    for name in (
        "prefill_timeout",
        "max_body_mb",
        "probe_interval",
        "probe_timeout",
        "answer_timeout",
        "role_interval",
    ):
        if not getattr(given, name) > 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0")
    if given.slo_tpot < 0 or given.role_dwell < 0:
        raise ConfigError("--slo-tpot and --role-dwell must not be negative")
    if not 0 <= given.port <= 65535:
        raise ConfigError(f"--port must be between 0 and 65535, got {given.port}")
    if given.max_retries < 0 or given.drain_timeout < 0:
        raise ConfigError("--max-retries and --drain-timeout must not be negative")
    return RouterOptions(
        instances=urls,
        policy=given.policy,
        host=given.host,
        port=given.port,
        keys=Keys(given.api_key, given.admin_key, given.instance_api_key),
        max_body_bytes=int(given.max_body_mb * 2**20),
        max_retries=given.max_retries,
        timing=Timing(
            given.probe_interval, given.probe_timeout, given.answer_timeout, given.drain_timeout
        ),
        kv_events=tuple(_publisher(word, urls) for word in given.kv_events),
        prefill=PrefillOptions(
            prefill_urls, given.policy, given.prefill_min_tokens, given.prefill_timeout
        ),
        goals=Goals(given.slo_tpot, given.role_interval, given.role_dwell)
        if given.slo_tpot
        else None,
    )


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="fastdeploy router",
        description="One OpenAI API in front of several servers of the same model.",
        epilog="An argument @FILE stands for the arguments in that file, one a line: so keys do "
        "not show in process lists.",
        fromfile_prefix_chars="@",
    )
    defaults, timing = RouterOptions(()), Timing()
    add = parser.add_argument
    add("--instances", nargs="+", required=True, metavar="URL[,URL...]", help="base URLs")
    add(
        "--prefill",
        nargs="+",
        default=[],
        metavar="URL[,URL...]",
        help="instances that compute prompts for the others, which share their --kv-store; not "
        "needed for those with a --splitwise-role, which are among --instances",
    )
    own = defaults.prefill
    text = "shorter prompts (estimated) are computed where they are answered; default: %(default)s"
    add("--prefill-min-tokens", type=int, default=own.min_tokens, help=text)
    add("--prefill-timeout", type=float, default=own.timeout_s, help="seconds; then without it")
    goals = Goals(0.0)
    text = "longest time between two tokens, seconds; above 0 the router changes roles by the load"
    add("--slo-tpot", type=float, default=goals.tpot_s, help=text)
    add("--role-interval", type=float, default=goals.interval_s, help="seconds between decisions")
    add("--role-dwell", type=float, default=goals.dwell_s, help="seconds between two role changes")
    add("--policy", choices=list(POLICIES), default=defaults.policy, help="default: %(default)s")
    add("--host", default=defaults.host, help="default: %(default)s")
    add("--port", type=int, default=defaults.port, help="0: any; default: %(default)s")
    add("--api-key", default="", help="clients must send it; else keys pass to the instances")
    add("--instance-api-key", default="", help="sent to instances in place of the client's")
    add("--admin-key", default="", help="turns on the routes below /admin")
    add("--max-body-mb", type=float, default=defaults.max_body_bytes / 2**20, help="MiB")
    add("--max-retries", type=int, default=defaults.max_retries, help="other instances to try")
    add("--probe-interval", type=float, default=timing.probe_interval_s, help="seconds")
    add("--probe-timeout", type=float, default=timing.probe_timeout_s, help="seconds")
    add(
        "--answer-timeout",
        type=float,
        default=timing.answer_timeout_s,
        help="seconds without a byte after which an instance has failed a request",
    )
    add(
        "--kv-events",
        nargs="+",
        action="extend",
        default=[],
        metavar="HOST:PORT=EVENTS[,REPLAY]",
        help="an instance, and the endpoints of an engine's --kv-events-config as they are reached "
        "from here; once for each engine",
    )
    add("--drain-timeout", type=float, default=timing.drain_timeout_s, help="after SIGTERM")
    return parser


def _publisher(text: str, urls: Sequence[str]) -> Publisher:
    name, _, addresses = text.partition("=")
    endpoint, *replay = addresses.split(",")
    known = [urlsplit(url).netloc for url in urls]
    valid = all(
        one.startswith(("tcp://", "ipc://")) and "*" not in one for one in (endpoint, *replay)
    )
    if name not in known or not valid or len(replay) > 1:
        raise ConfigError(
            f"--kv-events: {text!r:.100}; give INSTANCE=tcp://HOST:PORT,tcp://HOST:PORT, the "
            f"second for replays; instances are: {', '.join(known)}"
        )
    return Publisher(name, endpoint, *replay)


def _base_urls(words: Sequence[str]) -> tuple[str, ...]:
    return tuple(_base_url(url) for word in words for url in word.split(",") if url)


def _base_url(text: str) -> str:
    """The URL without a slash, or `/v1`, at its end."""
    url = text.strip()
    url = url if "://" in url else f"http://{url}"
    url = url.rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment or parts.username or parts.path:
        raise ConfigError(
            f"--instances or --prefill: {text!r} is no base URL; give http://HOST:PORT, several "
            "with commas"
        )
    return url

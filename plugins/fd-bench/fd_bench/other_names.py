"""Options of vLLM's and FastDeploy 2.x's benchmarks that have no effect here, with the reason.

Commands that their documents print run as they are, and say what was not done.
"""

from __future__ import annotations

import argparse
import sys
import textwrap

_OFFLINE = {
    "--backend X": "the engine of this process is measured",
    "--disable-detokenize": "answers are always made into text",
    "--async-engine": "the engine is a loop of its own in either case",
    "--hf-max-batch-size X": "there is no such backend here",
    "--profile": "plugins/fd-cuda/benchmarks/engine.py --profile shows kernels",
}
_SERVE = {
    "--append-result": "the file of --save-result is written anew",
    "--disable-tqdm": "there is no progress bar",
    "--disable-shuffle": "lines of a file are shuffled by --dataset-seed",
    "--ignore-eos": "answers have the length that was asked for, unless --respect-eos is given",
    "--insecure": "addresses are http://",
    "--label X": "the numbers are printed without one",
    "--metadata X...": "the file of --save-result has numbers only",
    "--no-oversample": "prompts are repeated until there are --num-prompts",
    "--percentile-metrics X": "all are printed",
    "--profile": "a running server is not profiled",
    "--ready-check-timeout-sec X": "the server must be there",
    "--request-id-prefix X": "the server names requests",
    "--save-detailed": "the file of --save-result has summaries",
    "--skip-chat-template": "the server applies it to messages, and to no text",
    "--skip-tokenizer-init": "no tokenizer is needed",
    "--tokenizer X": "no tokenizer is needed: random prompts are token ids",
    "--tokenizer-mode X": "no tokenizer is needed",
    "--trust-remote-code": "no tokenizer is needed",
}
_ANYWHERE = {
    "--dataset-name X": "a file's lines say what they are; without a file prompts are random",
}


class _Without(argparse.Action):
    """Says so when it is given."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        print(f"{option_string} has no effect: {self.const}", file=sys.stderr)


def add_options_without_effect(parser: argparse.ArgumentParser, is_offline: bool) -> None:
    """All of them; help names them at its end."""
    forms = {**_ANYWHERE, **(_OFFLINE if is_offline else _SERVE)}
    names = sorted(form.partition(" ")[0] for form in forms)
    text = f"Taken without effect, which a line says: {', '.join(names)}."
    parser.epilog = textwrap.fill(text, 79, break_on_hyphens=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for form, why in forms.items():
        flag, _, takes = form.partition(" ")
        nargs = {"": 0, "X": None, "X...": "+"}[takes]
        parser.add_argument(
            flag, action=_Without, nargs=nargs, const=why, dest="_", help=argparse.SUPPRESS
        )

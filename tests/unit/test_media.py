"""Pictures on their way through the core: parts of messages, what requests bring, and how much of
it a step encodes. The families that take pictures are in plugins, and so are tests with one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_core import plugins
from fastdeploy_core.config import BatchConfig
from fastdeploy_core.config.arguments import build_engine_config
from fastdeploy_core.contracts.model import MediaPart
from fastdeploy_core.engine.media import check_media, num_media_tokens, take_media
from fastdeploy_core.errors import ConfigError, InvalidRequest, PluginNotFound, UnsupportedModel
from fastdeploy_core.kvcache import KVCacheManager
from fastdeploy_core.models.shapes import model_class
from fastdeploy_core.scheduler import BatchScheduler
from fastdeploy_core.scheduler.settings import SchedulerSettings
from fastdeploy_core.tokenizer.chat_template import prepare_messages
from fastdeploy_core.types import (
    EmbeddedSpan,
    MediaItem,
    Request,
    SamplingParams,
    SequenceExtras,
)
from tests.null_engine import worker_info


def test_parts_are_taken_out_in_order_and_leave_their_place() -> None:
    picture = object()
    messages = [
        {"role": "system", "content": "S"},
        {
            "role": "user",
            "content": [
                "one",
                {"type": "image_url", "image_url": {"url": "data:a", "detail": "low"}},
                {"type": "text", "text": "two"},
                {"type": "image", "image": picture},
                {"type": "image_url", "image_url": "data:b"},
                {"type": "input_image", "image_url": "data:c"},
                {"image_url": {"url": "data:d"}},
            ],
        },
    ]
    kept = json.dumps(messages, default=str)
    changed, parts = take_media(messages, ("image",))
    assert json.dumps(messages, default=str) == kept
    assert parts == [
        MediaPart("image", "data:a", "messages[1].content[1]"),
        MediaPart("image", picture, "messages[1].content[3]"),
        MediaPart("image", "data:b", "messages[1].content[4]"),
        MediaPart("image", "data:c", "messages[1].content[5]"),
        MediaPart("image", "data:d", "messages[1].content[6]"),
    ]
    (_, user) = prepare_messages(changed, keep_parts=True, kinds=("image",))
    kinds = [part["type"] for part in user["content"]]
    assert kinds == ["text", "image", "text", *["image"] * 4]


def test_how_parts_are_prepared_goes_with_each_of_them() -> None:
    content = [{"type": "video_url", "video_url": {"url": "data:a"}}]
    _, parts = take_media([{"role": "user", "content": content}], ("video",), {"fps": 1})
    assert parts == [MediaPart("video", "data:a", "messages[0].content[0]", {"fps": 1})]
    for kinds in (("image",), ()):
        with pytest.raises(InvalidRequest, match="the messages have none"):
            take_media([{"role": "user", "content": content}], kinds, {"fps": 1})


def test_parts_that_nobody_takes_are_refused() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:a"}}
    messages = [{"role": "user", "content": [part]}]
    assert take_media(messages, ()) == (messages, [])
    with pytest.raises(InvalidRequest, match=r"'image_url'; this model takes text$"):
        prepare_messages(messages, keep_parts=True)
    changed, _ = take_media(messages, ("image",))
    with pytest.raises(InvalidRequest, match=r"'image'; this model takes text$"):
        prepare_messages(changed, keep_parts=False, kinds=("image",))
    of_others = {"type": "image", "source": {"type": "url", "url": "data:a"}}
    for other, field in (({"type": "image_url"}, "image_url"), (of_others, "image")):
        with pytest.raises(InvalidRequest) as refused:
            take_media([{"role": "user", "content": ["Hi", other]}], ("image",))
        assert str(refused.value) == (
            f"messages[0].content[1] has no {field}; possible: "
            '{"type": "image_url", "image_url": {"url": "data:image/..."}}'
        )


def test_a_turn_that_only_calls_tools_has_no_parts_for_templates_that_read_them() -> None:
    """Clients write null there; templates that do not find text iterate over it."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    (turn,) = prepare_messages([{"role": "assistant", "content": None, "tool_calls": [call]}], True)
    assert list(turn["content"]) == [] and str(turn["content"]) == ""
    (turn,) = prepare_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert turn["content"] is None


A, B = b"a" * 32, b"b" * 32


def request(
    spans: list[EmbeddedSpan], rows: dict[bytes, int], length: int = 40, **more: Any
) -> Request:
    extras = SequenceExtras(
        embeddings=spans,
        media=[MediaItem(digest, count, (1, 2, 2 * count)) for digest, count in rows.items()],
        positions=more.pop("positions", bytes(12 * length)),
    )
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    return Request(request_id=more.pop("name", "r"), prompt_token_ids=list(range(length)),
                   sampling=sampling, extras=extras)  # fmt: skip


def test_spans_items_and_positions_have_to_belong_together() -> None:
    good = request([EmbeddedSpan(2, 8, A), EmbeddedSpan(12, 8, A), EmbeddedSpan(30, 10, B)],
                   {A: 8, B: 10})  # fmt: skip
    check_media(good)
    assert num_media_tokens(good) == {"image_tokens": 26}
    check_media(request([EmbeddedSpan(2, 8, A)], {A: 8}, positions=b""))  # a token's index
    for bad in (
        request([EmbeddedSpan(2, 8, A)], {B: 8}),
        request([EmbeddedSpan(2, 9, A)], {A: 8}),
        request([EmbeddedSpan(2, 8, A, 1)], {A: 8}),
        request([EmbeddedSpan(2, 8, A, -1)], {A: 8}),
        request([EmbeddedSpan(2, 0, A)], {A: 8}),
        request([EmbeddedSpan(2, 8, A), EmbeddedSpan(9, 8, A)], {A: 8}),
        request([EmbeddedSpan(35, 8, A)], {A: 8}),
        request([EmbeddedSpan(2, 8, b"short")], {b"short": 8}),
        request([EmbeddedSpan(2, 8, A)], {A: 8}, positions=bytes(12 * 39)),
    ):
        with pytest.raises(InvalidRequest, match="do not belong together"):
            check_media(bad)


def planned(budget: int, requests: list[Request], **more: Any) -> list[dict[int, tuple[int, int]]]:
    """Start and number of tokens of every prompt's row, step by step, without running them."""
    batch = BatchConfig(
        max_num_seqs=8, max_num_batched_tokens=64, max_num_partial_prefills=4, **more
    )
    settings = SchedulerSettings(128, batch, worker_info(), max_encode_tokens=budget)
    scheduler = BatchScheduler(settings, KVCacheManager(64, 8, enable_prefix_caching=False))
    for each in requests:
        scheduler.add(each)
    steps = []
    for _ in range(12):
        step = scheduler.schedule()
        if step is None:
            break
        rows = {row.seq.seq_id: (row.start, row.num_tokens) for row in step.rows}
        steps.append({k: v for k, v in rows.items() if v[0] < 40})
    return [step for step in steps if step]


def test_a_step_stops_before_the_picture_for_which_it_has_no_room() -> None:
    two = [EmbeddedSpan(4, 10, A), EmbeddedSpan(20, 10, B)]
    rows = {A: 10, B: 10}
    assert planned(20, [request(two, rows)]) == [{0: (0, 40)}]
    # The second picture would be one vector too many; a picture larger than the budget goes alone.
    assert planned(19, [request(two, rows)]) == [{0: (0, 20)}, {0: (20, 20)}]
    assert planned(1, [request(two, rows)]) == [{0: (0, 20)}, {0: (20, 20)}]
    # Of several prompts a step has the pictures together; who has no room comes in the next.
    both = [request([EmbeddedSpan(0, 10, d)], {d: 10}, name=d.decode()) for d in (A, B)]
    assert planned(20, both) == [{0: (0, 40), 1: (0, 24)}, {1: (24, 16)}]
    assert planned(15, both) == [{0: (0, 40)}, {1: (0, 40)}]
    # A prompt that was cut inside a picture has encoded all of it.
    first = request([EmbeddedSpan(4, 10, A), EmbeddedSpan(16, 10, B)], rows)
    assert planned(10, [first], long_prefill_token_threshold=8) == [
        *({0: (0, 8)}, {0: (8, 8)}, {0: (16, 8)}, {0: (24, 8)}, {0: (32, 8)}),
    ]


def test_text_ignores_the_budget() -> None:
    plain = Request(request_id="t", prompt_token_ids=list(range(40)),
                    sampling=SamplingParams(max_tokens=2))  # fmt: skip
    assert planned(0, [plain]) == [{0: (0, 40)}]


def test_what_concerns_the_decoder_may_stand_in_a_text_config(tmp_path: Path) -> None:
    text = {"vocab_size": 9, "max_position_embeddings": 77, "tie_word_embeddings": True}
    config = {"architectures": ["X"], "dtype": "float32", "text_config": text}
    config |= {"transformers_version": "5.0.0", "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = build_engine_config({"model": str(tmp_path)}).model
    assert (model.max_model_len, model.hf_config["vocab_size"]) == (77, 9)
    assert model.hf_config["tie_word_embeddings"] is False
    for limits in ({"image": 0}, {"video": 0, "image": 1}, {"image": 0, "video": 0, "audio": 0}):
        config = build_engine_config({"model": str(tmp_path), "limit_mm_per_prompt": limits})
        assert config.media.language_model_only == (len(limits) == 3)
        assert ("vision_config" in config.model.hf_config) == (len(limits) == 3)
    newer = {"image": {"count": 2, "width": 512, "height": 512}, "video": {"count": 0}}
    config = build_engine_config({"model": str(tmp_path), "limit_mm_per_prompt": newer})
    assert config.media.limit_mm_per_prompt == {"image": 2, "video": 0}
    pixels = {"mm_processor_kwargs": {"max_pixels": 9}}
    config = build_engine_config({"model": str(tmp_path), **pixels, "hf_overrides": {"a": 1}})
    assert config.model.hf_config.items() >= {**pixels, "a": 1}.items()
    for given, reason in (
        ({"limit_mm_per_prompt": {"sound": 1}}, "expected image or video"),
        ({"limit_mm_per_prompt": {"image": -1}}, "expected image or video"),
        ({"limit_mm_per_prompt": {"image": True}}, "expected image or video"),
        ({"limit_mm_per_prompt": {"image": {"width": 1}}}, "expected image or video"),
        ({"allowed_local_media_path": str(tmp_path / "none")}, "is not a folder"),
    ):
        with pytest.raises(ConfigError, match=reason):
            build_engine_config({"model": str(tmp_path), **given})


def test_a_model_of_another_distribution_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(kind: str, name: str) -> None:
        raise PluginNotFound(name)

    monkeypatch.setattr(plugins, "lookup", missing)
    config = {"architectures": ["Qwen2_5_VLForConditionalGeneration"]}
    with pytest.raises(UnsupportedModel, match=r"run: pip install fd-vision$"):
        model_class(config)

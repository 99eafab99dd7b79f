"""Videos: which frames of them a model sees, how large, and what it says of them."""

from __future__ import annotations

import ast
import io
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import msgspec
import numpy as np
import pytest
import torch
import transformers
from fd_vision import video
from fd_vision.child import Job, answer, prepare
from fd_vision.patches import PatchRule
from fd_vision.processor import digest_of
from fd_vision.sources import Source, read_source
from fd_vision.video import VideoRule, chosen, frame_size, show_time
from PIL import Image, ImageDraw, ImageFont
from tiny import FAMILIES, Oracle, file_of, film, picture, runner_of

from fastdeploy_core.api.llm import LLM
from fastdeploy_core.contracts.model import MediaRules
from fastdeploy_core.errors import InvalidRequest
from fastdeploy_core.types import SamplingParams


def theirs(model: str, function: str, **more: Any) -> Callable[..., Any]:
    """A function of transformers' video processors, which is plain arithmetic; their files import
    torchvision, which resizes pixels."""
    file = Path(transformers.__file__).parent / "models" / model / f"video_processing_{model}.py"
    found = next(
        node for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == function
    )  # fmt: skip
    names: dict[str, Any] = {"np": np, "math": math, "torch": torch, "VideoMetadata": Any, **more}
    code = compile(ast.Module([found], []), str(file), "exec")
    exec(code, names)
    return names[function]  # type: ignore[no-any-return]


QWEN2, QWEN3 = theirs("qwen2_vl", "sample_frames"), theirs("qwen3_vl", "sample_frames")
ERNIE = theirs("ernie4_5_vl_moe", "sample_frames")
QWEN3_SIZE = theirs("qwen3_vl", "smart_resize")
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
ROOM = {"dtype": "float32", "max_model_len": 1024, "num_gpu_blocks_override": 96, "block_size": 16}
RULE = VideoRule(
    PatchRule(14, 2, 3136, 50176, (0.5,) * 3, (0.5,) * 3), "even", True, False, min_frames=2
)
ENDS = msgspec.structs.replace(RULE, sampling="ends", counts_all=True)
# Frames, width and height in steps, frames for a second.
CASES = {"short": (4, 3, 2, 2.0), "odd": (5, 2, 3, 2.0), "long": (16, 2, 2, 4.0)}


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "ernie4_5_vl"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def oracle(checkpoint: Callable[[str], Path], name: str) -> Oracle:
    return Oracle(checkpoint(name), name)


@pytest.fixture(scope="module")
def llm(checkpoint: Callable[[str], Path], fd_tensor: str, name: str) -> Iterator[LLM]:
    with LLM(checkpoint(name), tensor_library=fd_tensor, **ROOM) as made:
        yield made


def video_of(name: str, case: str) -> tuple[np.ndarray, float]:
    frames, wide, tall, fps = CASES[case]
    step = FAMILIES[name].step
    return film(frames, wide * step, tall * step, 5), fps


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_transformers(llm: LLM, oracle: Oracle, name: str, case: str) -> None:
    frames, fps = video_of(name, case)
    prompt = f"<|im_start|>user\nSee {oracle.family.film}What?<|im_end|>\n"
    given = {"prompt": prompt, "multi_modal_data": {"video": [(frames, {"fps": fps})]}}
    (output,) = llm.generate(given, GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == oracle.greedy(prompt, [], 64, [(frames, fps)])


def test_pictures_and_a_video_in_one_prompt(llm: LLM, oracle: Oracle, name: str) -> None:
    frames, fps = video_of(name, "short")
    images, family = [picture(90, 60, 1), picture(60, 120, 2)], oracle.family
    prompt = f"<|im_start|>user\n{family.place}{family.film}{family.place}Same?<|im_end|>\n"
    given = {
        "prompt": prompt,
        "multi_modal_data": {"image": images, "video": [(frames, {"fps": fps})]},
    }
    (output,) = llm.generate(given, GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == oracle.greedy(prompt, images, 64, [(frames, fps)])


def test_a_video_is_encoded_piece_by_piece(
    checkpoint: Callable[[str], Path], fd_tensor: str, name: str
) -> None:
    """Its frame pairs in one call or one a step, its prompt whole or cut: the same tokens; and the
    same video again is not encoded."""
    frames, fps = video_of(name, "long")
    prompt = f"<|im_start|>user\nSee {FAMILIES[name].film}What?<|im_end|>\n"
    given = {"prompt": prompt, "multi_modal_data": {"video": [(frames, {"fps": fps})]}}
    found = []
    for settings in ({}, {"max_encode_tokens": 1}, {"max_num_batched_tokens": 23}):
        settings = {"enable_prefix_caching": False, "max_num_seqs": 4, **settings}
        with LLM(checkpoint(name), tensor_library=fd_tensor, **ROOM, **settings) as llm:
            for _ in range(2):
                (output,) = llm.generate(given, GREEDY, use_tqdm=False)
                found.append(output.outputs[0].token_ids)
            assert runner_of(llm).media.num_encoded == 8
    assert all(each == found[0] for each in found)


# -- frames ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("total", [1, 2, 3, 7, 30, 99, 241, 5000])
@pytest.mark.parametrize("fps", [1.0, 2.0, 23.976, 25.0, 60.0])
def test_the_frames_that_transformers_takes(total: int, fps: float) -> None:
    meta = SimpleNamespace(total_num_frames=total, fps=fps)
    own = SimpleNamespace(fps=2.0, num_frames=None, min_frames=2, max_frames=768)
    own.temporal_patch_size = 2
    assert chosen(total, fps, ENDS) == QWEN3(own, meta).tolist()
    if total > 1:  # transformers has no answer for a single frame
        # Where it names a frame after the last one, transformers fails.
        sampled = [n for n in QWEN2(own, meta, fps=2.0).tolist() if n < total]
        assert chosen(total, fps, RULE) == sampled
    steps = msgspec.structs.replace(RULE, sampling="steps")
    sampled = [n for n in ERNIE(own, meta, fps=2.0).tolist() if n < total]
    assert chosen(total, fps, steps) == sampled
    for asked in (2, 6, 64):
        rules = [msgspec.structs.replace(rule, num_frames=asked) for rule in (RULE, ENDS)]
        if asked > total:
            with pytest.raises(InvalidRequest, match="ask for fewer"):
                chosen(total, fps, rules[0])
            continue
        for rule, sample in zip(rules, (QWEN2, QWEN3), strict=True):
            own.fps = None
            assert chosen(total, fps, rule) == sample(own, meta, num_frames=asked).tolist()


@pytest.mark.parametrize("size", [(64, 64), (20, 300), (1920, 1080), (33, 1000), (27, 27)])
@pytest.mark.parametrize("count", [2, 3, 8, 64])
def test_the_size_that_transformers_takes(size: tuple[int, int], count: int) -> None:
    limits = {"min_pixels": 128 * 28 * 28, "max_pixels": 768 * 28 * 28}
    rule = msgspec.structs.replace(ENDS, patches=msgspec.structs.replace(ENDS.patches, **limits))
    width, height = size
    tall, wide = QWEN3_SIZE(count, height, width, 2, 28, **limits)
    assert frame_size(width, height, count, rule) == (wide, tall)


def test_ernie_sees_the_time_in_a_corner() -> None:
    """Pixel by pixel what transformers draws."""
    font = next(Path("/usr/share/fonts").rglob("*.ttf"), None)
    if font is None:
        pytest.skip("no font on this machine")
    pillow = {"ImageFont": ImageFont, "ImageDraw": ImageDraw}
    same = {"to_pil_image": lambda image: image, "pil_to_tensor": lambda image: image}
    draw = theirs("ernie4_5_vl_moe", "_render_image_with_timestamp", **pillow, **same)
    words = theirs("ernie4_5_vl_moe", "_convert_timestamp")
    for seconds, size in ((0.0, (200, 120)), (3725.456, (300, 300)), (59.999, (64, 900))):
        ours, wanted = picture(*size, 1), picture(*size, 1)
        show_time(ours, seconds, str(font))
        draw(SimpleNamespace(font=str(font)), wanted, words(None, seconds))
        assert ours.tobytes() == wanted.tobytes() != picture(*size, 1).tobytes()


def job(source: bytes, rule: VideoRule = RULE, **more: Any) -> Job:
    limits = {"max_pixels": 10**6, "max_total": 10**7, "time_limit_s": 20.0}
    return Job(source=source, rule=rule, **{**limits, **more})


@pytest.mark.parametrize(
    ("codec", "kind"),
    [("libx264", "mp4"), ("libx264", "matroska"), ("mpeg4", "mp4"), ("libvpx-vp9", "webm")],
)
def test_a_file_is_its_frames(codec: str, kind: str) -> None:
    """Frames that PyAV decodes alone, one by one, give the same patches."""
    data = file_of(film(30, 84, 56, 3), codec, kind)
    with av.open(io.BytesIO(data)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    made = prepare(job(data))
    indices = chosen(30, 8.0, RULE)
    taken = np.stack([frames[n] for n in indices])
    given = prepare(job(taken.tobytes(), size=(84, 56), fps=2.0))
    assert made.patches == given.patches and made.grid == given.grid == (6, 4, 6)
    assert made.seconds == [n / 8 for n in indices]
    assert made.fps == pytest.approx(len(indices) / 30 * 8)


def test_frames_as_files() -> None:
    frames = film(4, 84, 56, 3)
    files = []
    for frame in frames:
        buffer = io.BytesIO()
        Image.fromarray(frame).save(buffer, "PNG")
        files.append(buffer.getvalue())
    made = prepare(job(b"".join(files), lengths=tuple(map(len, files))))
    assert made.patches == prepare(job(frames.tobytes(), size=(84, 56))).patches


def test_what_videos_are_told_apart_by() -> None:
    """Pixels, their sizes, how bytes are cut into frames, how many there are for a second; and what
    the model is shown of them."""
    raw = bytes(4 * 8 * 8 * 3)
    sources = [
        Source(raw, size, fps=fps) for size in ((8, 8), (16, 4), (4, 16)) for fps in (0.0, 1.0, 2.0)
    ]
    sources += [Source(raw, lengths=cut) for cut in ((768,), (384, 384), (1, 767), (767, 1))]
    sources += [Source(raw)]
    rules = [RULE, ENDS, *(msgspec.structs.replace(RULE, num_frames=n) for n in (1, 2))]
    rules += [msgspec.structs.replace(RULE, fps=1.0), msgspec.structs.replace(RULE, font="a")]
    digests = {digest_of(source, repr(rule), "") for source in sources for rule in rules}
    assert len(digests) == len(sources) * len(rules)


def test_too_many_frames_are_refused_before_they_are_decoded() -> None:
    rules = MediaRules()
    with pytest.raises(InvalidRequest, match="at most 768 frames"):
        read_source("data:video/jpeg;base64," + "," * 100_000, "video", rules)
    trusted = MediaRules(is_trusted=True)
    for bad in (np.zeros((769, 2, 2, 3), np.uint8), [], [np.zeros((2, 2, 3), np.uint8)] * 769):
        with pytest.raises(InvalidRequest, match="is no video"):
            read_source(bad, "video", trusted)
    uneven = [np.zeros((2, side, 3), np.uint8) for side in (2, 3)]
    with pytest.raises(InvalidRequest, match="one size"):
        read_source(uneven, "video", trusted)
    with pytest.raises(InvalidRequest, match="fps="):
        read_source((uneven, {"fps": "a"}), "video", trusted)


GOOD = file_of(film(12, 84, 56, 3))
BAD: dict[str, tuple[bytes, dict[str, Any], str]] = {
    "nothing": (b"", {}, "no video in a known format"),
    "a playlist": (b"#EXTM3U\nhttp://127.0.0.1/a.ts", {}, "no video in a known format"),
    "a concatenation": (b"ffconcat version 1.0\nfile /etc/passwd", {}, "no video in a known"),
    "a picture": (b"\x89PNG\r\n\x1a\n", {}, "no video in a known format"),
    "avi": (file_of(film(4, 84, 56, 3), "mpeg4", "avi"), {}, "no video in a known format"),
    "cut off": (GOOD[: len(GOOD) // 2], {}, "damaged"),
    "only its first bytes": (GOOD[:40], {}, "damaged"),
    "another codec": (file_of(film(4, 84, 56, 3), "ffv1", "matroska"), {}, "codec is not taken"),
    "large frames": (GOOD, {"max_pixels": 84 * 55}, "frames of 84x56 pixels are too large"),
    "too many pixels": (GOOD, {"max_total": 9000}, "pixels in all"),
    "more frames than it has": (
        GOOD,
        {"rule": msgspec.structs.replace(RULE, num_frames=500)},
        "ask for fewer",
    ),
    "too long": (file_of(np.zeros((601, 28, 28, 3), np.uint8), rate=1), {}, "601 seconds"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_video_gets_a_reason(case: str) -> None:
    data, more, reason = BAD[case]
    error = answer(job(data, **more)).error
    assert reason in error and "/" not in error


@pytest.mark.parametrize("seed", range(30))
def test_frames_are_resized_as_torch_does(seed: int) -> None:
    """transformers' video processors resize by torchvision, which does it by this call. It rounds
    weights to 16 bits and Pillow to 22, so that each of the two passes may round a value otherwise:
    2 levels of 255 at most. Noise shows the order of the passes: the other one differs by 20."""
    draw = np.random.default_rng(seed)
    height, width = (int(n) for n in draw.integers(8, 400, 2))
    frame = draw.choice([0, 255], (height, width, 3)).astype(np.uint8)
    rule = msgspec.structs.replace(RULE, is_joined=False)
    made = video.prepare(iter([Image.fromarray(frame)]), [0], 2.0, 1, rule, 10**9)
    rows, columns = made.grid[1:]
    cells = np.frombuffer(made.pixels, np.uint8)[: 3 * rows * columns * 14**2]
    cells = cells.reshape(rows // 2, columns // 2, 2, 2, 3, 14, 14)
    shown = cells.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * 14, columns * 14)
    wanted = torch.nn.functional.interpolate(
        torch.from_numpy(frame).permute(2, 0, 1)[None],
        tuple(shown.shape[1:]),
        mode="bicubic",
        antialias=True,
    )[0].numpy()
    apart = np.abs(shown.astype(int) - wanted.astype(int))
    assert apart.max() <= 2 and apart.mean() < 0.02

"""A Llama that sees: each picture becomes 16 vectors, in the place of 16 tokens."""

import base64
import binascii
import hashlib
import io

import numpy as np
from PIL import Image

from fastdeploy_core.errors import InvalidRequest
from fastdeploy_core.models.decoder import GroupedQueryLM
from fastdeploy_core.types import EmbeddedSpan, MediaItem, SequenceExtras

SIDE, PATCH = 32, 8  # pixels of the picture that the model sees, and of a patch
ROWS = (SIDE // PATCH) ** 2
MAX_BYTES, MAX_PIXELS, MAX_PICTURES = 2**20, 10**6, 4


class Processor:
    """What a front end does with pictures; it needs no tensor library."""

    kinds = ("image",)

    def __init__(self, token, rules):
        self.token, self.rules = token, rules
        self.limit = rules.limits.get("image", MAX_PICTURES)

    def prepare(self, token_ids, parts, salt):
        ids = list(token_ids)
        if ids.count(self.token) != len(parts) or len(parts) > self.limit:
            raise InvalidRequest(
                f"the prompt has {ids.count(self.token)} places for {len(parts)} pictures; at "
                f"most {self.limit} are possible"
            )
        if not parts:
            return ids, None
        items, spans, expanded = {}, [], []
        waiting = iter(parts)
        for token in ids:
            if token != self.token:
                expanded.append(token)
                continue
            part = next(waiting)
            try:
                item = self.item(part, salt)
            except InvalidRequest as error:
                raise InvalidRequest(f"{part.where}: {error}", param=part.where) from None
            items[item.digest] = item
            spans.append(EmbeddedSpan(len(expanded), ROWS, item.digest))
            expanded += [token] * ROWS
        return expanded, SequenceExtras(embeddings=spans, media=list(items.values()))

    def item(self, part, salt):
        if part.options:
            raise InvalidRequest("mm_processor_kwargs are not possible with this model")
        pixels = self.pixels(part.value)
        # What two pictures are told apart by: all that their vectors follow from, and the salt.
        digest = hashlib.sha256(f"toy 1, salt {len(salt)} {salt}".encode() + pixels).digest()
        return MediaItem(digest, ROWS, (1, SIDE // PATCH, SIDE // PATCH), pixels)

    def pixels(self, value):
        """The picture as uint8 patches. A server for strangers decodes in a process of its own."""
        image = value if self.rules.is_trusted and isinstance(value, Image.Image) else None
        try:
            if image is None:
                image = Image.open(io.BytesIO(self.file(value)), formats=("PNG", "JPEG"))
            if image.width * image.height > MAX_PIXELS:  # the header's, before it is decoded
                raise InvalidRequest(f"at most {MAX_PIXELS} pixels are possible")
            small = np.asarray(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC))
        except (OSError, ValueError, SyntaxError):
            raise InvalidRequest("this is no PNG or JPEG, or a damaged one") from None
        count = SIDE // PATCH
        cells = small.reshape(count, PATCH, count, PATCH, 3).transpose(0, 2, 1, 3, 4)
        return cells.tobytes()

    def file(self, value):
        head, comma, body = value.partition(",") if isinstance(value, str) else ("", "", "")
        if not comma or not head.startswith("data:image/") or not head.endswith(";base64"):
            raise InvalidRequest("a picture is given as data:image/png;base64,...")
        if len(body) > MAX_BYTES:
            raise InvalidRequest(f"a picture has at most {MAX_BYTES} characters")
        try:
            return base64.b64decode(body, validate=True)
        except binascii.Error:
            raise InvalidRequest("the data: URL is not valid base64") from None

    def close(self):
        pass


class ToyVisionForCausalLM(GroupedQueryLM):
    """One instance per rank."""

    features = frozenset({"embeddings"})

    @staticmethod
    def media(config, folder, rules):
        return Processor(config["image_token_id"], rules)

    def __init__(self, config, build):
        super().__init__(config, build)
        hidden, self.xp, self.to_device = config["hidden_size"], build.xp, build.device.to_device
        self.dtype = build.xp.dtype(build.dtype)
        # A tower is small: every rank has all of it, in full precision.
        inputs = 3 * PATCH**2
        self.up = build.linear("vision.up", inputs, hidden, bias=True, quantize=False)
        self.down = build.linear("vision.down", hidden, hidden, bias=True, quantize=False)

    def encode(self, items):
        pixels = np.concatenate([np.frombuffer(item.data, np.uint8) for item in items])
        cells = self.to_device(pixels.reshape(len(items) * ROWS, -1)).to(self.dtype)
        return self.down(self.xp.gelu(self.up(cells / 127.5 - 1)))

    def forward(self, input_ids, positions, context):
        x, residual = self.embedding(input_ids), None
        if context.embedded is not None:
            self.xp.index_copy_(x, 0, context.embedded.tokens, context.embedded.vectors)
        *before, last = self.layers
        for layer in before:
            x, residual = layer(x, residual, positions, context)
        x, residual = last(x, residual, positions, context, context.rows)
        return self.norm.add(x, residual)[0]

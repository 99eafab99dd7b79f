"""GPT-NeoX and Pythia (transformers: GPTNeoXForCausalLM): LayerNorm, biases, no gate."""

from fastdeploy_core.contracts.model import AttentionSpec, ModelShapes
from fastdeploy_core.errors import ConfigError, UnsupportedModel
from fastdeploy_core.layers import HeadShape, RotarySpec


class HeadPart:
    """q, k or v of a checkpoint tensor that holds all three head by head."""

    def __init__(self, stored, number, heads):
        self._stored, self._number, self._heads = stored, number, heads
        self.shape, self.dtype = (stored.shape[0] // 3, *stored.shape[1:]), stored.dtype

    def read(self, *region):
        parts = self._stored.read().reshape([self._heads, 3, -1, *self.shape[1:]])
        return parts[:, self._number].reshape(list(self.shape))[region]


class Block:
    """x + attention(norm1(x)) + mlp(norm2(x)), or one after the other."""

    def __init__(self, build, prefix, config, spec, rotary):
        hidden, wide, num_heads, eps = (
            config[key]
            for key in ("hidden_size", "intermediate_size", "num_attention_heads", "layer_norm_eps")
        )
        heads = HeadShape(hidden, num_heads, num_heads)
        self.gelu, self.is_parallel = build.xp.gelu, config.get("use_parallel_residual", True)
        self.norm1 = build.layer_norm(f"{prefix}.input_layernorm", hidden, eps)
        self.norm2 = build.layer_norm(f"{prefix}.post_attention_layernorm", hidden, eps)
        bias, name = config.get("attention_bias", True), f"{prefix}.attention"
        self.attention = build.gqa(name, heads, spec, rotary, qkv_bias=bias, output_bias=bias)
        up, down = f"{prefix}.mlp.dense_h_to_4h", f"{prefix}.mlp.dense_4h_to_h"
        self.up = build.linear(up, hidden, wide, bias=True, parallel="column")
        self.down = build.linear(down, wide, hidden, bias=True, parallel="row")

    def __call__(self, x, positions, context):
        total = x + self.attention(self.norm1(x), positions, context)
        seen = x if self.is_parallel else total
        return total + self.down(self.gelu(self.up(self.norm2(seen))))


class GPTNeoXForCausalLM:
    """One instance per rank."""

    features = frozenset()

    @staticmethod
    def shapes(config, tp_size, dtype):
        heads, layers, hidden = (
            config[key] for key in ("num_attention_heads", "num_hidden_layers", "hidden_size")
        )
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if config["hidden_act"] != "gelu" or rope.get("rope_type", "default") != "default":
            raise UnsupportedModel("possible: hidden_act gelu, rope_type default")
        if heads % tp_size or config["intermediate_size"] % tp_size:
            raise ConfigError(f"{heads} heads cannot be divided among {tp_size} ranks")
        dim, mine = hidden // heads, heads // tp_size
        spec = AttentionSpec("gqa", mine, mine, dim, dim, scale=dim**-0.5, dtype=dtype)
        vocab, longest = config["vocab_size"], config["max_position_embeddings"]
        return ModelShapes("GPTNeoXForCausalLM", layers, vocab, hidden, longest, (spec,) * layers)

    def __init__(self, config, build):
        shapes = self.shapes(config, build.tp_size, build.dtype)
        rope = {**config, **(config.get("rope_parameters") or {})}
        share = rope.get("partial_rotary_factor", rope.get("rotary_pct", 0.25))
        theta = float(rope.get("rope_theta", rope.get("rotary_emb_base", 10000)))
        spec, self.num_heads = shapes.layers[0], config["num_attention_heads"]
        rotary = RotarySpec(dim=int(spec.head_dim * share), theta=theta)
        hidden, vocab, self.weights = shapes.hidden_size, shapes.vocab_size, build.weights
        self.weights.rename(".attention.dense.", ".attention.o_proj.")
        for buffer in ("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"):
            self.weights.ignore(buffer)  # old checkpoints contain them
        self.select_rows = build.kernels["select_rows"]
        self.embedding = build.embedding("gpt_neox.embed_in", vocab, hidden)
        names = [f"gpt_neox.layers.{number}" for number in range(shapes.num_layers)]
        self.blocks = [Block(build, name, config, spec, rotary) for name in names]
        self.norm = build.layer_norm("gpt_neox.final_layer_norm", hidden, config["layer_norm_eps"])
        tied = self.embedding if config.get("tie_word_embeddings") else None
        self.lm_head = build.lm_head("embed_out", vocab, hidden, tied=tied)

    def forward(self, input_ids, positions, context):
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x, positions, context)
        return self.norm(x if context.rows is None else self.select_rows(x, context.rows))

    def compute_logits(self, hidden):
        return self.lm_head(hidden)

    def load_weights(self, tensors):
        return self.weights.load(part for pair in tensors for part in self.parts(*pair))

    def parts(self, name, stored):
        if ".query_key_value." not in name:
            return [(name, stored)]
        names = (name.replace("query_key_value", f"{part}_proj") for part in "qkv")
        return [(n, HeadPart(stored, i, self.num_heads)) for i, n in enumerate(names)]

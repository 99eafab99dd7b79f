"""Tiny random checkpoints as transformers and sentence-transformers save them, with their own
answers beside them.

Run as a program in a child process (`build(folder)` does that), because both need torch and the
suite may be running on Paddle. answers.json holds, by model, what the libraries say of TEXTS, of
PAIRS or of IDS.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TEXTS = [
    "The capital of China is Beijing.",
    "Gravity is a force that attracts two bodies towards each other.",
    "yes",
    "A much longer text, which goes on and on. " * 5,
    "no no yes, hello world",
]
QUERY = "What is the capital of China?"
PAIRS = [(QUERY, text) for text in TEXTS]
CONVERSATION = [
    {"role": "user", "content": "What is the capital of China?"},
    {"role": "assistant", "content": "Beijing."},
]
# Token ids of prompts with a token after each step; STEP_ID is that token.
STEP_ID = 7
STEPS = [[9, 12, 30, 7, 40, 41, 7, 55, 7], [20, 7]]
CORPUS = [*TEXTS, QUERY, "yes no yes no yes no", "system user assistant Judge Document Query"] * 4
TEMPLATE = (
    "{%- for m in messages %}"
    "{{- '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
)
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
}
CAUSAL = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 256, "head_dim": 8}
ENCODER = {**SIZES, "max_position_embeddings": 200}


def build(folder: Path) -> dict[str, Any]:
    """Write all models below the folder, once; returns their answers."""
    done = folder / "answers.json"
    if not done.exists():
        kept = {n: v for n, v in os.environ.items() if not n.startswith("FD_")}
        command = [sys.executable, __file__, str(folder)]
        subprocess.run(command, check=True, env={**kept, "HF_HUB_OFFLINE": "1"})
    answers: dict[str, Any] = json.loads(done.read_text())
    return answers


def _byte_level(adds_end: bool) -> Any:
    """Qwen's style; an embedding model's appends the end of text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if adds_end:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$A <|endoftext|>",
            pair="$A <|endoftext|> $B <|endoftext|>",
            special_tokens=[("<|endoftext|>", 0)],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        padding_side="left",
        chat_template=None if adds_end else TEMPLATE,
    )


def _bert_style() -> Any:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=200,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],  # BertTokenizer's
    )


def _roberta_style() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<s>", "<pad>", "</s>", "<unk>"]
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        cls_token="<s>",
        sep_token="</s>",
        model_max_length=198,
    )


def _main(folder: Path) -> None:
    import torch
    import transformers as tf

    torch.set_num_threads(1)
    answers: dict[str, Any] = {}

    def save(name: str, tokenizer: Any, make: Any, config: Any) -> Any:
        torch.manual_seed(len(name))
        model = make(config).eval()
        # Random biases and norms: those of a fresh model are zeros and ones.
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data += torch.randn_like(parameter) * 0.2
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        return model

    def sentence(name: str, mode: str, *, normalizes: bool) -> None:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer import modules

        transformer = modules.Transformer(str(folder / name))
        parts = [transformer, modules.Pooling(SIZES["hidden_size"], pooling_mode=mode)]
        parts += [modules.Normalize()] if normalizes else []
        prompts = {"query": "What is: ", "document": ""}
        model = SentenceTransformer(modules=parts, device="cpu", prompts=prompts)
        asked = model.encode(TEXTS, batch_size=1, prompt_name="query")
        answers[name] = {
            "texts": model.encode(TEXTS, batch_size=1).tolist(),
            "query_texts": asked.tolist(),
        }
        model.save_pretrained(str(folder / name))

    def cross(name: str) -> None:
        from sentence_transformers import CrossEncoder

        model = CrossEncoder(str(folder / name), device="cpu")
        answers[name] = {"pairs": model.predict(PAIRS, batch_size=1).tolist()}

    def logits(name: str, model: Any, tokenizer: Any) -> None:
        with torch.no_grad():
            found = [model(**tokenizer(t, return_tensors="pt")).logits[0] for t in TEXTS]
        answers[name] = {"texts": [x.tolist() for x in found]}

    embeds, plain = _byte_level(True), _byte_level(False)
    bert, roberta = _bert_style(), _roberta_style()
    size = {"vocab_size": len(plain), "pad_token_id": 0}

    save("qwen3-embedding", embeds, tf.Qwen3Model, tf.Qwen3Config(**CAUSAL, **size))
    sentence("qwen3-embedding", "lasttoken", normalizes=True)
    save("qwen2-mean", _byte_level(True), tf.Qwen2Model, tf.Qwen2Config(**CAUSAL, **size))
    sentence("qwen2-mean", "mean", normalizes=False)
    size = {"vocab_size": len(bert), "pad_token_id": 0}
    save("bert-mean", bert, tf.BertModel, tf.BertConfig(**ENCODER, **size))
    sentence("bert-mean", "mean", normalizes=True)
    config = tf.BertConfig(**ENCODER, **size, num_labels=1)
    save("bert-cross", bert, tf.BertForSequenceClassification, config)
    cross("bert-cross")
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "type_vocab_size": 1}
    size = {"vocab_size": len(roberta), **ids}
    save("xlmr-cls", roberta, tf.XLMRobertaModel, tf.XLMRobertaConfig(**ENCODER, **size))
    sentence("xlmr-cls", "cls", normalizes=True)
    config = tf.XLMRobertaConfig(**ENCODER, **size, num_labels=1)
    save("xlmr-cross", roberta, tf.XLMRobertaForSequenceClassification, config)
    cross("xlmr-cross")
    size = {"vocab_size": len(plain), "pad_token_id": 0}
    config = tf.Qwen3Config(**CAUSAL, **size, num_labels=3)
    model = save("qwen3-classes", plain, tf.Qwen3ForSequenceClassification, config)
    logits("qwen3-classes", model, plain)
    config = tf.LlamaConfig(**CAUSAL, **size, num_labels=1)
    model = save("llama-reward", plain, tf.LlamaForSequenceClassification, config)
    logits("llama-reward", model, plain)
    text = plain.apply_chat_template(CONVERSATION, tokenize=False)
    with torch.no_grad():
        found = model(**plain(text, return_tensors="pt")).logits[0].tolist()
    answers["llama-reward"]["conversation"] = found
    config = tf.Qwen3Config(**CAUSAL, **size, tie_word_embeddings=False)
    model = save("qwen3-reranker", plain, tf.Qwen3ForCausalLM, config)
    answers["qwen3-reranker"] = {"pairs": _model_card(model, plain), "ids": _card_ids(plain)}
    _process_rewards(folder, plain, size, answers)
    (folder / "answers.json").write_text(json.dumps(answers))


def _card_ids(tokenizer: Any) -> list[list[int]]:
    """process_inputs() of Qwen3-Reranker's model card."""
    prefix = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n"
    )
    suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    instruction = "Given a web search query, retrieve relevant passages that answer the query"
    before, behind = (tokenizer.encode(t, add_special_tokens=False) for t in (prefix, suffix))
    texts = [f"<Instruct>: {instruction}\n<Query>: {q}\n<Document>: {d}" for q, d in PAIRS]
    return [before + tokenizer(text)["input_ids"] + behind for text in texts]


def _model_card(model: Any, tokenizer: Any) -> list[float]:
    """compute_logits() of the same model card."""
    import torch

    no, yes = (tokenizer.convert_tokens_to_ids(word) for word in ("no", "yes"))
    found = []
    for ids in _card_ids(tokenizer):
        with torch.no_grad():
            scores = model(torch.tensor([ids])).logits[0, -1]
        pair = torch.nn.functional.log_softmax(torch.stack([scores[no], scores[yes]]), dim=0)
        found.append(float(pair[1].exp()))
    return found


def _process_rewards(folder: Path, tokenizer: Any, size: Any, answers: dict[str, Any]) -> None:
    """Qwen2.5-Math-PRM: its own code is not in transformers. A Qwen2 with two linear layers and a
    relu between them as "score"; probabilities of two classes at each step's token."""
    import torch
    import transformers as tf
    from safetensors.torch import save_file

    torch.manual_seed(3)
    config = tf.Qwen2Config(**CAUSAL, **size, num_labels=2)
    model = tf.Qwen2Model(config).eval()
    width = SIZES["hidden_size"]
    score = torch.nn.Sequential(
        torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 2)
    )
    name = folder / "qwen2-prm"
    tokenizer.save_pretrained(name)
    tensors = {f"model.{key}": value.contiguous() for key, value in model.state_dict().items()}
    tensors |= {f"score.{key}": value for key, value in score.state_dict().items()}
    save_file(tensors, name / "model.safetensors", metadata={"format": "pt"})
    values = {**config.to_dict(), "architectures": ["Qwen2ForProcessRewardModel"]}
    values |= {"dtype": "float32", "transformers_version": tf.__version__}
    (name / "config.json").write_text(json.dumps(values))
    found = []
    for ids in STEPS:
        with torch.no_grad():
            every = torch.softmax(score(model(torch.tensor([ids])).last_hidden_state[0]), -1)
        found.append([row.tolist() for row, token in zip(every, ids, strict=True) if token == 7])
    answers["qwen2-prm"] = {"steps": found}


if __name__ == "__main__":
    _main(Path(sys.argv[1]))

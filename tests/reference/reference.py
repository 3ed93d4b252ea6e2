"""An independent reading of a GGUF model: token ids and logits, to compare the engine with.

usage: reference.py MODEL.gguf TEXTS.json OUT

Nothing here shares code or arithmetic with the engine: the file is read by the `gguf` package, text is cut by the Python
`tokenizers` package, and the forward pass is NumPy in double precision over the dequantised weights.

TEXTS.json: {"logits": {name: text}, "tokens": [text, ...]}. Written to OUT:
  ids.json        {"logits": {name: [id, ...]}, "tokens": [[id, ...], ...], "special": [[id, ...], ...]}
  <name>.f32      logits, little-endian, [positions][vocab]
"""

import json
import pathlib
import sys

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers


class Model:
    def __init__(self, path):
        reader = GGUFReader(path)
        self.meta = {key: field.contents() for key, field in reader.fields.items()}
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.layers = self.meta["llama.block_count"]
        self.heads = self.meta["llama.attention.head_count"]
        self.kv_heads = self.meta["llama.attention.head_count_kv"]
        self.head_dim = self.meta["llama.embedding_length"] // self.heads
        self.eps = self.meta["llama.attention.layer_norm_rms_epsilon"]
        self.base = self.meta["llama.rope.freq_base"]
        self.embedding = self.weight("token_embd.weight")
        tied = "output.weight" not in self.tensors
        self.head = self.embedding if tied else self.weight("output.weight")

    def weight(self, name):
        tensor = self.tensors[name]
        return dequantize(tensor.data, tensor.tensor_type).astype(np.float64)

    def norm(self, x, name):
        scale = 1.0 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return x * scale * self.weight(name)

    def rotate(self, x):
        """x: [positions, heads, head_dim], adjacent pairs."""
        pairs = np.arange(self.head_dim // 2)
        angle = np.outer(np.arange(x.shape[0]), self.base ** (-2.0 * pairs / self.head_dim))
        cos, sin = np.cos(angle)[:, None, :], np.sin(angle)[:, None, :]
        even, odd = x[..., 0::2], x[..., 1::2]
        out = np.empty_like(x)
        out[..., 0::2] = even * cos - odd * sin
        out[..., 1::2] = odd * cos + even * sin
        return out

    def attention(self, x, prefix):
        n = x.shape[0]
        q = self.rotate((x @ self.weight(prefix + "attn_q.weight").T).reshape(n, self.heads, self.head_dim))
        k = self.rotate((x @ self.weight(prefix + "attn_k.weight").T).reshape(n, self.kv_heads, self.head_dim))
        v = (x @ self.weight(prefix + "attn_v.weight").T).reshape(n, self.kv_heads, self.head_dim)
        hidden = np.triu(np.ones((n, n), dtype=bool), 1)
        out = np.empty_like(q)
        for head in range(self.heads):
            group = head * self.kv_heads // self.heads
            scores = q[:, head] @ k[:, group].T / np.sqrt(self.head_dim)
            scores[hidden] = -np.inf
            scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
            out[:, head] = scores @ v[:, group] / scores.sum(axis=-1, keepdims=True)
        return out.reshape(n, -1) @ self.weight(prefix + "attn_output.weight").T

    def feed_forward(self, x, prefix):
        gate = x @ self.weight(prefix + "ffn_gate.weight").T
        up = x @ self.weight(prefix + "ffn_up.weight").T
        return (gate / (1.0 + np.exp(-gate)) * up) @ self.weight(prefix + "ffn_down.weight").T

    def logits(self, ids):
        """[positions, vocab]"""
        x = self.embedding[np.asarray(ids)]
        for layer in range(self.layers):
            prefix = f"blk.{layer}."
            x = x + self.attention(self.norm(x, prefix + "attn_norm.weight"), prefix)
            x = x + self.feed_forward(self.norm(x, prefix + "ffn_norm.weight"), prefix)
        return self.norm(x, "output_norm.weight") @ self.head.T


def tokenizer_of(meta):
    """(with special tokens, without them), as the published tokenizer of SmolLM2 is put together."""
    assert meta["tokenizer.ggml.pre"] == "smollm"
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]

    def build():
        model = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
        tokenizer = Tokenizer(model)
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        return tokenizer

    special = build()
    special.add_special_tokens([AddedToken(t, special=True) for t, kind in zip(tokens, types) if kind == 3])
    return special, build()


def main(model_path, texts_path, out):
    out = pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    texts = json.loads(pathlib.Path(texts_path).read_text(encoding="utf-8"))
    model = Model(model_path)
    special, plain = tokenizer_of(model.meta)
    ids = {name: plain.encode(text).ids for name, text in texts["logits"].items()}
    for name, row in ids.items():
        model.logits(row).astype("<f4").tofile(out / f"{name}.f32")
    result = {
        "logits": ids,
        "tokens": [plain.encode(text).ids for text in texts["tokens"]],
        "special": [special.encode(text).ids for text in texts["tokens"]],
    }
    (out / "ids.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The forward pass of glm_moe_dsa in numpy float64: what the engine's logits are compared with.

Written from the mathematics alone; it shares no line and no kernel with the engine. Only three
things are float32 here, because a model is defined with them: the stored weights, the rotary
angles (see `rotary_tables`) and nothing else. Whole sequences are evaluated at once, without a
cache. The MTP layer (index num_hidden_layers) is ignored.

    python reference.py tests/fixtures/NAME …   compares with the stored logits, experts and keys

Shape letters: T tokens, D hidden, H heads, E experts, nI and dI heads and width of the indexer.
A weight is [out, in]; a layer maps x to x @ W.T.
"""

import json
import sys
from pathlib import Path

import numpy as np

LAYER_NORM_EPS = 1e-6  # of the indexer's key norm; no configuration field changes it
NORM_TOPK_EPS = 1e-20  # guards the division by the sum of the chosen scores

PLAIN_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "U8": "u1", "F8_E4M3": "u1"}


def read_safetensors(path):
    """The tensors of one file: name -> (dtype string, array). BF16 comes as its 16 bits."""
    data = Path(path).read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8:start]).items():
        if name != "__metadata__":
            begin, end = (start + offset for offset in entry["data_offsets"])
            array = np.frombuffer(data[begin:end], PLAIN_DTYPES[entry["dtype"]])
            tensors[name] = entry["dtype"], array.reshape(entry["shape"])
    return tensors


def widen(dtype, array):
    """A plain float tensor as float32, exactly."""
    if dtype == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    if dtype not in ("F32", "F16"):
        raise ValueError(f"dtype {dtype} is not a plain float")
    return array.astype(np.float32)


def read_model(directory):
    """config.json and all plain float tensors of a directory."""
    directory = Path(directory)
    weights = {}
    for path in sorted(directory.glob("*.safetensors")):
        for name, (dtype, array) in read_safetensors(path).items():
            weights[name] = widen(dtype, array)
    return json.loads((directory / "config.json").read_text()), weights


def mlp_kinds(config):
    """"dense" or "sparse" for each layer."""
    layers = config["num_hidden_layers"]
    dense = min(config.get("first_k_dense_replace", 3), layers)
    default = ["dense"] * dense + ["sparse"] * (layers - dense)
    return config.get("mlp_layer_types") or default


def indexer_kinds(config):
    """"full" or "shared" for each layer."""
    if config.get("indexer_types"):
        return config["indexer_types"]
    pattern = config.get("index_topk_pattern")
    if pattern:
        names = {"F": "full", "S": "shared"}
        return [names.get(kind, kind) for kind in pattern]
    step, offset = config.get("index_topk_freq", 1), config.get("index_skip_topk_offset", 2)
    layers = range(config["num_hidden_layers"])
    return ["full" if max(i - offset + 1, 0) % step == 0 else "shared" for i in layers]


def rotary_tables(config, length):
    """cos and sin [T, rope/2] of float32 angles.

    The power is rounded to float32 once, its reciprocal again, the product with the position
    again: these roundings are part of the model.
    """
    parameters = config.get("rope_parameters") or {}
    theta = parameters.get("rope_theta", config.get("rope_theta", 10000.0))
    width = config["qk_rope_head_dim"]
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    powers = np.power(np.float64(theta), exponents.astype(np.float64)).astype(np.float32)
    inverse = np.float32(1) / powers
    angles = np.arange(length, dtype=np.float32)[:, None] * inverse[None, :]
    return np.cos(angles.astype(np.float64)), np.sin(angles.astype(np.float64))


def rotate(x, cos, sin):
    """Rotates the pairs (2j, 2j+1) of the last axis of x [T, …, rope]."""
    shape = (x.shape[0],) + (1,) * (x.ndim - 2) + (cos.shape[1],)
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    even, odd = x[..., 0::2], x[..., 1::2]
    out = np.empty_like(x)
    out[..., 0::2] = even * cos - odd * sin
    out[..., 1::2] = odd * cos + even * sin
    return out


def silu(x):
    return x / (1 + np.exp(-x))


def cut_margin(scores, kept):
    """Distance between the smallest kept and the largest dropped of 1-D scores."""
    dropped = np.setdiff1d(np.arange(len(scores)), kept)
    dropped = dropped[np.isfinite(scores[dropped])]
    if len(dropped) == 0:
        return np.inf
    return float(scores[kept].min() - scores[dropped].max())


def best(scores, count):
    """Indices of the `count` largest, descending; equal scores by lowest index."""
    return np.argsort(-scores, kind="stable")[:count]


class Reference:
    """One model. `weights` maps names to float32 arrays; sums are float64."""

    def __init__(self, config, weights):
        self.config = config
        self.weights = weights
        self.eps = config["rms_norm_eps"]

    def run(self, tokens):
        """Logits [T, V] and everything the model decided on the way.

        Returns a dict: `logits`; `router`, for each sparse layer and position the experts,
        best first; `indexer_selected`, for each full layer and position the kept keys,
        ascending; `router_min` and `index_min`, the closest that any cut came to a tie.
        """
        config = self.config
        self.trace = {"router": [], "indexer_selected": []}
        self.margins = {"router_min": np.inf, "index_min": np.inf}
        self.cos, self.sin = rotary_tables(config, len(tokens))
        x = self.weight("model.embed_tokens.weight")[np.asarray(tokens)]
        visible = np.tril(np.ones((len(tokens), len(tokens)), bool))
        kinds = zip(indexer_kinds(config), mlp_kinds(config))
        for layer, (indexer, mlp) in enumerate(kinds):
            prefix = f"model.layers.{layer}."
            normed = self.rms(x, prefix + "input_layernorm.weight")
            latent = self.linear(normed, prefix + "self_attn.q_a_proj")
            latent = self.rms(latent, prefix + "self_attn.q_a_layernorm.weight")
            if indexer == "full":
                visible = self.select(normed, latent, prefix + "self_attn.indexer.")
            x = x + self.attention(normed, latent, visible, prefix + "self_attn.")
            normed = self.rms(x, prefix + "post_attention_layernorm.weight")
            if mlp == "dense":
                x = x + self.ffn(normed, prefix + "mlp.")
            else:
                x = x + self.mixture(normed, prefix + "mlp.")
        x = self.rms(x, "model.norm.weight")
        tied = config.get("tie_word_embeddings", False)
        head = "model.embed_tokens.weight" if tied else "lm_head.weight"
        return {"logits": x @ self.weight(head).T, **self.trace, **self.margins}

    def weight(self, name):
        return self.weights[name].astype(np.float64)

    def linear(self, x, name):
        y = x @ self.weight(name + ".weight").T
        bias = name + ".bias"
        return y + self.weight(bias) if bias in self.weights else y

    def rms(self, x, name):
        return self.weight(name) * x / np.sqrt(np.mean(x * x, -1, keepdims=True) + self.eps)

    def attention(self, x, latent, visible, prefix):
        config, length = self.config, len(x)
        heads, rope = config["num_attention_heads"], config["qk_rope_head_dim"]
        nope, values = config["qk_nope_head_dim"], config["v_head_dim"]
        q = self.linear(latent, prefix + "q_b_proj").reshape(length, heads, nope + rope)
        compressed = self.linear(x, prefix + "kv_a_proj_with_mqa")
        kv_latent, k_rope = np.split(compressed, [config["kv_lora_rank"]], axis=1)
        kv_latent = self.rms(kv_latent, prefix + "kv_a_layernorm.weight")
        kv = self.linear(kv_latent, prefix + "kv_b_proj").reshape(length, heads, nope + values)
        q_rope = rotate(q[..., nope:], self.cos, self.sin)
        k_rope = rotate(k_rope, self.cos, self.sin)
        scores = np.einsum("thd,shd->hts", q[..., :nope], kv[..., :nope])
        scores += np.einsum("thd,sd->hts", q_rope, k_rope)
        scores = np.where(visible, scores / np.sqrt(nope + rope), -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        context = np.einsum("hts,shd->thd", scores, kv[..., nope:])
        return self.linear(context.reshape(length, heads * values), prefix + "o_proj")

    def select(self, x, latent, prefix):
        """Which keys each position may attend to [T, T]: the best index_topk of the past."""
        config, length = self.config, len(x)
        heads, width = config["index_n_heads"], config["index_head_dim"]
        rope, keep = config["qk_rope_head_dim"], config["index_topk"]
        q = self.linear(latent, prefix + "wq_b").reshape(length, heads, width)
        k = self.linear(x, prefix + "wk")
        k = k - k.mean(-1, keepdims=True)
        k = k / np.sqrt(np.mean(k * k, -1, keepdims=True) + LAYER_NORM_EPS)
        k = k * self.weight(prefix + "k_norm.weight") + self.weight(prefix + "k_norm.bias")
        q = np.concatenate([rotate(q[..., :rope], self.cos, self.sin), q[..., rope:]], -1)
        k = np.concatenate([rotate(k[..., :rope], self.cos, self.sin), k[..., rope:]], -1)
        match = np.maximum(np.einsum("thd,sd->ths", q, k) / np.sqrt(width), 0)
        head_weights = self.linear(x, prefix + "weights_proj") / np.sqrt(heads)
        scores = np.einsum("th,ths->ts", head_weights, match)
        visible = np.zeros((length, length), bool)
        chosen = []
        for t in range(length):
            kept = best(scores[t, : t + 1], keep)
            visible[t, kept] = True
            chosen.append(sorted(int(s) for s in kept))
            self.note("index_min", cut_margin(scores[t, : t + 1], kept))
        self.trace["indexer_selected"].append(chosen)
        return visible

    def ffn(self, x, prefix):
        gated = silu(self.linear(x, prefix + "gate_proj")) * self.linear(x, prefix + "up_proj")
        return self.linear(gated, prefix + "down_proj")

    def mixture(self, x, prefix):
        config, out = self.config, np.zeros_like(x)
        scores = 1 / (1 + np.exp(-self.linear(x, prefix + "gate")))
        ranks = scores + self.weight(prefix + "gate.e_score_correction_bias")
        chosen = [self.route(row) for row in ranks]
        for t, experts in enumerate(chosen):
            weights = scores[t, experts]
            if config["norm_topk_prob"]:
                weights = weights / (weights.sum() + NORM_TOPK_EPS)
            for expert, weight in zip(experts, weights * config["routed_scaling_factor"]):
                out[t] += weight * self.ffn(x[t : t + 1], f"{prefix}experts.{expert}.")[0]
        self.trace["router"].append([[int(expert) for expert in row] for row in chosen])
        if config.get("n_shared_experts", 1):
            out += self.ffn(x, prefix + "shared_experts.")
        return out

    def route(self, ranks):
        """The experts of one position: best groups first, then the best experts in them."""
        groups = self.config.get("n_group", 1)
        if groups > 1:
            by_group = ranks.reshape(groups, -1)
            group_scores = np.sort(by_group, axis=1)[:, -2:].sum(1)
            kept = best(group_scores, self.config["topk_group"])
            self.note("router_min", cut_margin(group_scores, kept))
            allowed = np.isin(np.arange(groups), kept)
            ranks = np.where(allowed[:, None], by_group, -np.inf).reshape(-1)
        experts = best(ranks, self.config["num_experts_per_tok"])
        self.note("router_min", cut_margin(ranks, experts))
        return experts

    def note(self, which, margin):
        self.margins[which] = min(self.margins[which], margin)


def check(directory):
    """Compares with what a fixture stores; returns the largest difference of a logit."""
    directory = Path(directory)
    config, weights = read_model(directory)
    reference = json.loads((directory / "ref.json").read_text())
    result = Reference(config, weights).run(reference["full_ids"])
    gold = directory / "logits_cfgeps.f32"
    gold = gold if gold.exists() else directory / "logits_gold.f32"
    stored = np.fromfile(gold, "<f4").reshape(result["logits"].shape)
    difference = float(np.abs(result["logits"] - stored).max())
    trace = json.loads((directory / "trace.json").read_text())
    same = {}
    for key in ("router", "indexer_selected"):
        ours = [[sorted(row) for row in layer] for layer in result[key]]
        theirs = [[sorted(row) for row in layer] for layer in trace.get(key, [])]
        same[key] = ours == theirs if theirs else "not stored"
    predicted = result["logits"].argmax(-1).tolist() == reference["tf_pred"]
    print(
        f"{directory.name}: max {difference:.1e}, argmax {predicted}, experts {same['router']},"
        f" keys {same['indexer_selected']}, nearest router cut {result['router_min']:.1e},"
        f" index cut {result['index_min']:.1e}"
    )
    return difference if predicted and False not in same.values() else np.inf


if __name__ == "__main__":
    sys.exit(max(check(path) for path in sys.argv[1:]) > 1e-5)

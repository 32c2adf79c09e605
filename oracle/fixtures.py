"""Makes the model fixtures under tests/fixtures with Hugging Face transformers.

A fixture is a tiny glm_moe_dsa model with random weights, as `save_pretrained` writes it, and what
the model computes on a short sequence:

  ref.json          prompt_ids, full_ids (prompt + greedy), tf_pred (argmax per position), margins
  logits_gold.f32   [T, vocab] little-endian float32: transformers' own code run in float64, with
                    the float32 RoPE angles of the original (`gold_module` below)
  logits_cfgeps.f32 a_seed only: the same with rms_norm_eps in the two latent norms, where
                    transformers fixes 1e-6. All other configs say 1e-6, so both readings agree.
  trace.json        router[j][t]: experts of position t in the j-th sparse layer, best biased score
                    first. indexer_selected[j][i]: keys (ascending) kept in layer indexer_layers[j]
                    for position i, or for position indexer_positions[i] if that is a list.

Seeds were searched (`search`) so that no decision is near a tie: a float32 engine must agree on
every token, expert and key exactly. Refuses to write a fixture that breaks these margins.

  fixtures.py build NAME... [--out DIR]   write fixtures (default DIR: tests/fixtures)
  fixtures.py search NAME [--tries N]     find a seed that meets the margins
  fixtures.py check DIR...                recompute logits, tokens and traces of existing fixtures
  fixtures.py mutate DIR...               how far deliberate mistakes move the logits
"""

import argparse
import json
import sys
import types
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as original

FIXTURES = Path(__file__).resolve().parent.parent / "tests" / "fixtures"
MIN_ARGMAX_GAP = 1e-3
MIN_CUT = 2e-4
MAX_FIXTURE_BYTES = 250_000

EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}

# --- The gold model: transformers' source with its float32 islands widened to float64 ----------

# (old text, new text, occurrences) outside the rotary embedding, whose angles stay float32.
WIDEN = [
    (".to(torch.float32)", ".to(torch.float64)", 1),  # RMSNorm statistics
    ("dtype=torch.float32).to(query.dtype)", "dtype=torch.float64).to(query.dtype)", 1),  # softmax
    ("q.float(), k.transpose(-1, -2).float()", "q.double(), k.transpose(-1, -2).double()", 1),
    (".to(self.weights_proj.weight.dtype)).float()", ".to(self.weights_proj.weight.dtype))", 1),
    (".type(torch.float32)", ".type(torch.float64)", 2),  # router
    # Not maths: keep the scores for the trace.
    (
        "        topk = min(self.index_topk",
        "        self.scores = index_scores\n        topk = min(self.index_topk",
        1,
    ),
]

# Deliberate mistakes, to see that a fixture notices them.
MUTATIONS = {
    "rope_half_split": [
        (
            "q1, q2 = q[..., 0::2], q[..., 1::2]",
            "q1, q2 = q.chunk(2, dim=-1)",
            1,
        ),
        ("k1, k2 = k[..., 0::2], k[..., 1::2]", "k1, k2 = k.chunk(2, dim=-1)", 1),
    ],
    "index_topk_plus_1": [("min(self.index_topk,", "min(self.index_topk + 1,", 1)],
    "index_no_relu": [("scores = F.relu(scores)", "pass", 1)],
    "shared_layers_dense": [
        (
            "topk_indices = prev_topk_indices\n",
            "topk_indices = torch.arange(key_states.shape[2]).expand(1, seq_length, -1)\n",
            1,
        )
    ],
    "shared_layers_use_first_full": [
        (
            "prev_topk_indices=topk_indices,  # MAIN",
            "prev_topk_indices=getattr(self.layers[0].self_attn, 'first', None),  # MAIN",
            1,
        ),
        (
            "        sparse_indices = None\n",
            "        self.first = topk_indices\n        sparse_indices = None\n",
            1,
        ),
    ],
    "no_shared_expert": [("+ self.shared_experts(residuals)", "", 1)],
    "no_attention_bias": [("bias=config.attention_bias", "bias=False", 3)],
    "norm_topk_flipped": [("if self.norm_topk_prob:", "if not self.norm_topk_prob:", 1)],
    "router_no_bias": [("scores + self.e_score_correction_bias", "scores", 1)],
    "router_weights_biased": [
        ("topk_weights = scores.gather", "topk_weights = scores_for_choice.gather", 1)
    ],
    "theta_default": [('config.rope_parameters["rope_theta"]', "10000.0", 1)],
}


def replace_all(text, substitutions):
    """Applies substitutions, each of which must occur the stated number of times."""
    for old, new, count in substitutions:
        found = text.count(old)
        if found != count:
            raise SystemExit(f"transformers' source has {found} of {old!r}, expected {count}")
        text = text.replace(old, new)
    return text


def gold_module(mutation=()):
    """transformers' modelling source as a module of its own, widened and perhaps mutated."""
    text = Path(original.__file__).read_text()
    start = text.index("class GlmMoeDsaRotaryEmbedding")
    end = text.index("def apply_rotary_pos_emb_interleave")
    rotary = text[start:end]
    text = replace_all(text[:start] + "@@ROTARY@@" + text[end:], WIDEN)
    text = replace_all(text.replace("@@ROTARY@@", rotary), mutation)
    module = types.ModuleType(original.__package__ + ".modeling_gold")
    module.__package__ = original.__package__
    module.__file__ = original.__file__
    sys.modules[module.__name__] = module
    exec(compile(text, "modeling_gold", "exec"), module.__dict__)
    return module


class Gold:
    """The float64 model, and what it decided in its last forward pass."""

    def __init__(self, model, latent_eps=None, mutation=()):
        config = model.config
        self.config = config
        self.model = gold_module(mutation).GlmMoeDsaForCausalLM._from_config(config, **EAGER)
        self.model = self.model.eval().double()
        state = {name: tensor.double() for name, tensor in model.state_dict().items()}
        self.model.load_state_dict(state, strict=not mutation)
        for layer in self.model.model.layers:
            if latent_eps is not None:
                layer.self_attn.q_a_layernorm.variance_epsilon = latent_eps
                layer.self_attn.kv_a_layernorm.variance_epsilon = latent_eps
        self.logits_of_router = {}
        for i, layer in enumerate(self.model.model.layers):
            if hasattr(layer.mlp, "gate"):
                hook = lambda _m, _i, out, i=i: self.logits_of_router.__setitem__(i, out)
                layer.mlp.gate.register_forward_hook(hook)

    @torch.no_grad()
    def logits(self, ids):
        """[T, vocab] in float64."""
        out = self.model(torch.tensor([ids]), use_cache=False).logits[0]
        assert out.dtype == torch.float64
        return out

    def router(self):
        """(experts [layers][T][K] best first, smallest difference at the cut)."""
        chosen, cut = [], float("inf")
        for i in sorted(self.logits_of_router):
            logits, _, indices = self.logits_of_router[i]
            gate = self.model.model.layers[i].mlp.gate
            biased = logits.sigmoid() + gate.e_score_correction_bias
            if gate.num_group > 1:
                groups = biased.view(len(biased), gate.num_group, -1)
                sums = groups.topk(2, dim=-1)[0].sum(-1)
                best, order = sums.sort(descending=True)
                if gate.topk_group < gate.num_group:
                    gap = best[:, gate.topk_group - 1] - best[:, gate.topk_group]
                    cut = min(cut, gap.min().item())
                keep = torch.zeros_like(sums).scatter(1, order[:, : gate.topk_group], 1).bool()
                biased = groups.masked_fill(~keep[..., None], float("-inf")).flatten(1)
            ranked, order = biased.sort(descending=True)
            assert torch.equal(order[:, : gate.top_k].sort()[0], indices.sort()[0])
            gaps = ranked[:, gate.top_k - 1] - ranked[:, gate.top_k]
            cut = min(cut, gaps.min().item())
            chosen.append(order[:, : gate.top_k].tolist())
        return chosen, cut

    def indexer(self):
        """(layers, keys [layers][T] ascending, cuts: differences between last kept, first cut)."""
        layers, kept, cuts = [], [], []
        for i, layer in enumerate(self.model.model.layers):
            if layer.self_attn.indexer is None:
                continue
            scores, rows = layer.self_attn.indexer.scores[0], []
            for t in range(len(scores)):
                ranked, order = scores[t, : t + 1].sort(descending=True)
                k = self.config.index_topk
                rows.append(sorted(order[:k].tolist()))
                if t + 1 > k:
                    cuts.append((ranked[k - 1] - ranked[k]).item())
            layers.append(i)
            kept.append(rows)
        return layers, kept, cuts


# --- The fixtures ------------------------------------------------------------------------------


def tiny(pattern, mlp, **more):
    """Config keywords of the tiny models; `pattern` FFS…, `mlp` D/S a layer."""
    config = dict(
        vocab_size=64,
        hidden_size=24,
        intermediate_size=28,
        moe_intermediate_size=8,
        num_hidden_layers=len(pattern),
        num_attention_heads=3,
        num_key_value_heads=3,
        n_routed_experts=6,
        n_shared_experts=1,
        num_experts_per_tok=2,
        q_lora_rank=16,
        kv_lora_rank=12,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=8,
        index_head_dim=8,
        index_n_heads=8,
        index_topk=8,
        first_k_dense_replace=mlp.count("D"),
        indexer_types=[{"F": "full", "S": "shared"}[c] for c in pattern],
        mlp_layer_types=[{"D": "dense", "S": "sparse"}[c] for c in mlp],
        rms_norm_eps=1e-6,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    config.update(more)
    return config


SEED_PROMPT = [3, 14, 159, 26, 53, 58, 200, 11, 77, 240, 5, 99]
SEED_CONFIG = dict(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=64,
    moe_intermediate_size=32,
    num_hidden_layers=5,
    first_k_dense_replace=3,
    num_attention_heads=4,
    num_key_value_heads=4,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_shared_experts=1,
    q_lora_rank=64,
    kv_lora_rank=32,
    qk_nope_head_dim=24,
    qk_rope_head_dim=8,
    v_head_dim=32,
    index_topk=4096,
    index_head_dim=16,
    index_n_heads=2,
    max_position_embeddings=4096,
)


def legacy_keys(config):
    """Says the same as `config` with the keys of older checkpoints, and one trap."""
    theta = config.pop("rope_parameters")["rope_theta"]
    for key in ("mlp_layer_types", "indexer_types", "layer_types", "qk_head_dim"):
        config.pop(key)
    # full iff max(i - offset + 1, 0) % freq == 0: F F F S F; the defaults (1, 2) say otherwise
    config.update(rope_theta=theta, index_topk_freq=2, index_skip_topk_offset=3)
    config.update(head_dim=192)  # to be ignored: the rotary size is qk_rope_head_dim
    return config


# name: config, seed, prompt length, full length; then what is special.
SPECS = {
    "a_seed": dict(config=SEED_CONFIG, seed=1234, prompt=SEED_PROMPT, full=32, init="seed"),
    "c_shared": dict(config=tiny("FFSSFS", "DDSSSS"), seed=3, prompt=48, full=72),
    "i_tied_bias": dict(
        config=tiny("FFS", "DSS", tie_word_embeddings=True, attention_bias=True),
        seed=1,
        prompt=32,
        full=56,
    ),
    "j_legacy": dict(
        config=tiny(
            "FFFSF",
            "DDSSS",
            norm_topk_prob=False,
            n_shared_experts=2,
            rope_parameters={"rope_type": "default", "rope_theta": 8000000.0},
        ),
        seed=4,
        prompt=40,
        full=64,
        edit=legacy_keys,
    ),
    "k_long": dict(
        config=tiny("FSF", "DSS", vocab_size=48, index_topk=32, n_routed_experts=5),
        seed=280,
        prompt=560,
        full=600,
        positions=[0, 31, 32, 33] + list(range(47, 600, 24)),
    ),
    "l_f16": dict(
        config=tiny("FFSF", "DSSS"), seed=2, prompt=40, full=64, dtype=torch.float16
    ),
}


def init_seed(model):
    """The seed recipe: every matrix N(0, 0.05), norms 1, a ramp as router bias."""
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.normal_(0, 0.05)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.1, 0.1, len(buffer)))


def init_all(model):
    """Nothing trivial: matrices keep the scale of their input, norms and biases are random."""
    tied = model.config.tie_word_embeddings
    for name, parameter in model.named_parameters():
        shape = parameter.shape
        if name.endswith("embed_tokens.weight"):
            parameter.normal_(0, 0.4 if tied else 1.0)
        elif name == "lm_head.weight":
            parameter.normal_(0, 2.0 / shape[-1] ** 0.5)
        elif name.endswith("bias"):
            parameter.normal_(0, 0.2)
        elif parameter.dim() == 1:
            parameter.normal_(1, 0.25).clamp_(0.5, 1.6)
        elif "weights_proj" in name:
            parameter.normal_(0, 8.0 / shape[-1] ** 0.5)  # wide scores: clear cuts
        elif name.endswith("mlp.gate.weight"):
            parameter.normal_(0, 2.0 / shape[-1] ** 0.5)
        else:
            parameter.normal_(0, 1.2 / shape[-1] ** 0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0, 0.15)


@torch.no_grad()
def make_model(spec, seed):
    """The float32 model whose values are exactly those that the file will hold."""
    config = GlmMoeDsaConfig(**json.loads(json.dumps(spec["config"])))
    torch.manual_seed(seed)
    model = GlmMoeDsaForCausalLM._from_config(config, **EAGER).eval().float()
    (init_seed if spec.get("init") == "seed" else init_all)(model)
    if "dtype" in spec:
        for parameter in model.parameters():
            parameter.copy_(parameter.to(spec["dtype"]).float())
    return model


def make_prompt(spec, seed):
    if isinstance(spec["prompt"], list):
        return spec["prompt"]
    rng = np.random.default_rng(seed)
    return rng.integers(0, spec["config"]["vocab_size"], spec["prompt"]).tolist()


def argmax_gaps(logits):
    best = logits.topk(2, dim=-1)[0]
    return best[:, 0] - best[:, 1]


def margins_of(gold, logits):
    _, router_cut = gold.router()
    _, _, cuts = gold.indexer()
    gaps = argmax_gaps(logits)
    return {
        "argmax_gap_min": gaps.min().item(),
        "argmax_gap_median": gaps.median().item(),
        "logit_std": logits.std().item(),
        "logit_absmax": logits.abs().max().item(),
        "index_cuts": len(cuts),
        "index_cut_abs_min": min(cuts) if cuts else None,
        "index_ties": sum(cut == 0 for cut in cuts),
        "router_cut_min": router_cut,
    }


def broken(margins):
    """The margins that are too small."""
    low = []
    if margins["argmax_gap_min"] <= MIN_ARGMAX_GAP:
        low.append("argmax_gap_min")
    if margins["index_cut_abs_min"] is not None and margins["index_cut_abs_min"] <= MIN_CUT:
        low.append("index_cut_abs_min")
    if margins["router_cut_min"] <= MIN_CUT:
        low.append("router_cut_min")
    return low


def greedy(gold, prompt, full):
    """Greedy continuation by whole forward passes, no cache involved."""
    ids = list(prompt)
    while len(ids) < full:
        logits = gold.logits(ids)
        if broken(margins_of(gold, logits)):
            return None
        ids.append(int(logits[-1].argmax()))
    return ids


# --- Commands ----------------------------------------------------------------------------------


def search(name, tries):
    spec = SPECS[name]
    for seed in range(1, tries + 1):
        gold, prompt = Gold(make_model(spec, seed)), make_prompt(spec, seed)
        margins = margins_of(gold, gold.logits(prompt))
        if broken(margins):
            continue
        ids = greedy(gold, prompt, spec["full"])
        if ids is None:
            continue
        margins = margins_of(gold, gold.logits(ids))
        if not broken(margins):
            print(f"{name}: seed {seed}: {margins}")
            return
    print(f"{name}: no seed up to {tries}")


def save_model(model, spec, out):
    """save_pretrained, in the stored dtype; the router's bias stays float32."""
    dtype = spec.get("dtype")
    if dtype is not None:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        model.config.dtype = dtype
    model.save_pretrained(out)
    (out / "generation_config.json").unlink(missing_ok=True)
    (out / "model.safetensors").chmod(0o644)
    if "edit" in spec:
        config = spec["edit"](json.loads((out / "config.json").read_text()))
        (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def load_model(directory):
    """A fixture as transformers reads it, in float32 maths."""
    model = GlmMoeDsaForCausalLM.from_pretrained(directory, dtype=torch.float32, **EAGER)
    return model.eval()


def write_json(path, value):
    path.write_text(json.dumps(value, separators=(",", ":")) + "\n")


def write_floats(path, tensor):
    path.write_bytes(tensor.to(torch.float32).numpy().astype("<f4").tobytes())


def trace_of(gold, spec):
    layers, kept, cuts = gold.indexer()
    trace = {"router": gold.router()[0]}
    if cuts:
        positions = spec.get("positions")
        if positions is not None:
            kept = [[rows[t] for t in positions] for rows in kept]
        trace.update(indexer_selected=kept, indexer_layers=layers)
        trace["indexer_positions"] = positions or "all"
    trace["note"] = (
        "router[j][t] = experts of position t in the j-th sparse layer, best biased score first; "
        "indexer_selected[j][i] = keys of layer indexer_layers[j], position i "
        "(or indexer_positions[i])"
    )
    return trace


@torch.no_grad()
def build(name, root):
    spec, out = SPECS[name], root / name
    out.mkdir(parents=True, exist_ok=True)
    model = make_model(spec, spec["seed"])
    gold, prompt = Gold(model), make_prompt(spec, spec["seed"])
    ids = greedy(gold, prompt, spec["full"])
    logits = gold.logits(ids) if ids else None
    margins = margins_of(gold, logits) if ids else None
    if not ids or broken(margins):
        raise SystemExit(f"{name}: margins too small; search another seed")
    trace = trace_of(gold, spec)
    save_model(model, spec, out)
    reread = load_model(out)
    single = reread(torch.tensor([ids]), use_cache=False).logits[0]
    generated = reread.generate(
        torch.tensor([prompt]), max_new_tokens=len(ids) - len(prompt), do_sample=False
    )[0].tolist()
    predicted = logits.argmax(-1).tolist()
    report = {
        "hf32_vs_gold": (single.double() - logits).abs().max().item(),
        "hf_generate_matches": generated == ids,
        "tf_pred_f32_eq_f64": single.argmax(-1).tolist() == predicted,
        "reread_gold_equal": torch.equal(Gold(reread).logits(ids), logits),
    }
    write_floats(out / "logits_gold.f32", logits)
    if model.config.rms_norm_eps != 1e-6:
        other = Gold(reread, latent_eps=model.config.rms_norm_eps).logits(ids)
        report["cfgeps_vs_gold"] = (other - logits).abs().max().item()
        write_floats(out / "logits_cfgeps.f32", other)
    reference = {"prompt_ids": prompt, "full_ids": ids, "tf_pred": predicted}
    reference.update(vocab=model.config.vocab_size, seed=spec["seed"], margins=margins)
    reference.update(report=report, versions=versions())
    write_json(out / "ref.json", reference)
    write_json(out / "trace.json", trace)
    size = sum(file.stat().st_size for file in out.iterdir())
    print(f"{name}: {size} bytes, {margins}, {report}")
    if size > MAX_FIXTURE_BYTES and name != "a_seed":
        raise SystemExit(f"{name}: {size} bytes, more than {MAX_FIXTURE_BYTES}")


def versions():
    return {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}


def read_fixture(directory):
    reference = json.loads((directory / "ref.json").read_text())
    stored = np.fromfile(directory / "logits_gold.f32", dtype="<f4")
    stored = torch.from_numpy(stored.reshape(len(reference["full_ids"]), -1))
    return reference, stored


def check(directory):
    """Recomputes a stored fixture; True if it holds."""
    reference, stored = read_fixture(directory)
    gold = Gold(load_model(directory))
    logits = gold.logits(reference["full_ids"])
    worst = (logits - stored.double()).abs().max().item()
    trace = json.loads((directory / "trace.json").read_text())
    layers, kept, _ = gold.indexer()
    positions = trace.get("indexer_positions", "all")
    if positions != "all":
        kept = [[rows[t] for t in positions] for rows in kept]
    same = {
        "tf_pred": logits.argmax(-1).tolist() == reference["tf_pred"],
        "router": gold.router()[0] == trace["router"],
        "kept": "indexer_selected" not in trace
        or (layers, kept) == (trace["indexer_layers"], trace["indexer_selected"]),
    }
    print(f"{directory.name}: max |difference| to the stored gold {worst:.2e}, equal: {same}")
    return worst < 1e-5 and all(same.values())


def mutate(directory):
    """Largest change of a logit, and changed argmaxes, under each deliberate mistake."""
    reference, stored = read_fixture(directory)
    model = load_model(directory)
    for label, mutation in MUTATIONS.items():
        logits = Gold(model, mutation=mutation).logits(reference["full_ids"])
        delta = (logits - stored.double()).abs().max().item()
        flips = int((logits.argmax(-1) != stored.argmax(-1)).sum())
        print(f"| {directory.name} | {label} | {delta:.3g} | {flips}/{len(stored)} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["build", "search", "check", "mutate"])
    parser.add_argument("names", nargs="+", help="fixture names, or directories to check")
    parser.add_argument("--out", type=Path, default=FIXTURES)
    parser.add_argument("--tries", type=int, default=1000)
    args = parser.parse_args()
    torch.set_num_threads(1)  # one order of summation, so that a rerun gives the same bytes
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    good = True
    for name in args.names:
        if args.command == "build":
            build(name, args.out)
        elif args.command == "search":
            search(name, args.tries)
        elif args.command == "check":
            good &= check(Path(name))
        else:
            mutate(Path(name))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()

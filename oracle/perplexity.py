"""The perplexity of a text by transformers' own code, as `coli score` defines it, and drafts.

    python perplexity.py oracle/demo oracle/demo/held_out.txt
    coli score --model oracle/demo --text oracle/demo/held_out.txt --window 512

MODEL is a container as `demo.py` writes it, or a directory with plain floats; its weights are
decoded exactly, and transformers computes in float64 (`fixtures.py` says how), with rms_norm_eps
in all norms. The text is read in windows behind `[gMASK]<sop>`: the first scores all its tokens,
each further one its last `--stride`. transformers has no MTP layer: here it is a model of one
layer by transformers, fed as the engine feeds it. `agree` is the share of scored tokens at which
its first choice, made a token earlier, is the main model's: what a greedy draft would be accepted.
Needs requirements.txt.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from demo import matrix_shape, read_container
from fixtures import Gold, load_model
from formats import plain_f32, write_safetensors


def gold(config, weights):
    """A float64 transformers model with these float32 arrays, which remembers what its head saw."""
    with tempfile.TemporaryDirectory() as directory:
        directory = Path(directory)
        (directory / "config.json").write_text(json.dumps(config))
        tensors = {name: plain_f32(array)[0] for name, array in weights.items()}
        write_safetensors(directory / "model.safetensors", tensors)
        model = Gold(load_model(directory), latent_eps=config["rms_norm_eps"])
    model.model.model.norm.register_forward_hook(
        lambda _module, _inputs, out: setattr(model, "hidden", out[0])
    )
    return model


class Scorer:
    def __init__(self, directory):
        config = json.loads((directory / "config.json").read_text())
        weights = read_container(directory, lambda name: matrix_shape(config, name))
        layers = config["num_hidden_layers"]
        mtp = f"model.layers.{layers}."
        main = {name: w for name, w in weights.items() if not name.startswith(mtp)}
        self.eps = config["rms_norm_eps"]
        self.main = gold(config, main)
        double = lambda name: torch.from_numpy(weights[name].copy()).double()
        self.embedding = double("model.embed_tokens.weight")
        self.inputs = {n: double(f"{mtp}{n}.weight") for n in ("enorm", "hnorm", "eh_proj")}
        alone = {n.replace(mtp, "model.layers.0."): w for n, w in weights.items() if mtp in n}
        alone["model.norm.weight"] = alone.pop("model.layers.0.shared_head.norm.weight")
        for name in self.inputs:
            del alone[f"model.layers.0.{name}.weight"]
        alone |= {name: weights[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}
        kinds = {"indexer_types": ["full"], "mlp_layer_types": ["sparse"]}
        kinds |= {"num_hidden_layers": 1, "layer_types": config["layer_types"][:1]}
        self.mtp = gold(config | kinds, alone)

    @torch.no_grad()
    def logits(self, tokens):
        """Of the main model [T, V], and of the MTP layer's rows [T - 1, V]."""
        logits = self.main.logits(tokens)
        norm = lambda x, name: F.rms_norm(x, x.shape[-1:], self.inputs[name], self.eps)
        embedded = norm(self.embedding[tokens[1:]], "enorm")
        both = torch.cat([embedded, norm(self.main.hidden[:-1], "hnorm")], -1)
        rows = F.linear(both, self.inputs["eh_proj"])[None]
        return logits, self.mtp.model(inputs_embeds=rows, use_cache=False).logits[0]


def windows(tokens, window, stride):
    """(where it starts, the first token it scores, where it ends) of each."""
    start, scored, end = 0, 0, min(window, tokens)
    yield start, scored, end
    while end < tokens:
        start, scored, end = start + stride, end, min(end + stride, tokens)
        yield start, scored, end


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--stride", type=int, help="default: half a window")
    args = parser.parse_args()
    scorer = Scorer(args.model)
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    text = tokenizer.encode(args.text.read_text("utf-8")).ids
    prefix = [tokenizer.token_to_id(name) for name in ("[gMASK]", "<sop>")]
    body = args.window - len(prefix)
    nll = tokens = agree = 0
    for start, scored, end in windows(len(text), body, args.stride or (body + 1) // 2):
        sequence = prefix + text[start:end]
        first = len(prefix) + scored - start
        logits, drafts = scorer.logits(sequence)
        wanted = torch.tensor(sequence[first:])
        nll += float(F.cross_entropy(logits[first - 1 : -1], wanted, reduction="sum"))
        tokens += len(wanted)
        same = logits[first - 1 : -1].argmax(-1) == drafts[first - 2 : -1].argmax(-1)
        agree += int(same.sum())
        if sys.stderr.isatty():
            print(f"\r{end}/{len(text)} ", end="", file=sys.stderr, flush=True)
    ppl = float(torch.tensor(nll / tokens).exp())
    print(f"tokens {tokens} · nll {nll:.4f} · ppl {ppl:.4f} · agree {agree / tokens:.4f}")


if __name__ == "__main__":
    main()

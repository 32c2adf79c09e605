//! The forward pass against references that were made with another implementation
//! (`oracle/fixtures.py`): logits, tokens, router choices, kept keys and hidden states; and its
//! independence of how a sequence is cut, cached and budgeted.

mod common;

use colibri::engine::{Finish, Options};
use colibri::model::{Observer, Unobserved};
use colibri::plan::Limit;
use colibri::sample::{Params, Sampler, argmax};
use common::{
    TempDir, Trace, all_logits, difference, fixture, integers, open, read_floats, read_json,
    read_safetensors, write_safetensors,
};

/// One expert slot a layer, so that every test also reads, evicts and reads again.
fn tight() -> Options {
    Options {
        ctx_tokens: 700,
        chunk_rows: 64,
        limit: Limit::SlotsPerLayer(1),
        ..Options::default()
    }
}

/// Tokens, logits, experts and keys of one fixture.
fn check_fixture(name: &str, gold: &str, max_abs: f64, max_rms: f64) {
    let dir = fixture(name);
    let engine = open(&dir, tight());
    let reference = read_json(&dir.join("ref.json"));
    let full = integers(reference.get("full_ids").unwrap());
    let prompt = integers(reference.get("prompt_ids").unwrap());
    let predicted = integers(reference.get("tf_pred").unwrap());

    let mut trace = Trace::read(&dir, engine.config());
    let logits = all_logits(&engine, &full, &mut trace);
    let vocab = engine.config().vocab_size;
    let got: Vec<u32> = logits.chunks_exact(vocab).map(|row| argmax(row).unwrap()).collect();
    assert_eq!(got, predicted, "{name}: teacher forcing");
    let (max, rms) = difference(&logits, &read_floats(&dir.join(gold)));
    println!("{name}: max {max:.2e} rms {rms:.2e}");
    assert!(max <= max_abs && rms <= max_rms, "{name}: max {max:.2e}, rms {rms:.2e}");
    trace.assert_complete(full.len());

    let mut tokens = prompt;
    let mut session = engine.session().unwrap();
    while tokens.len() < full.len() {
        let next = argmax(session.advance(&tokens, &mut Unobserved).unwrap()).unwrap();
        tokens.push(next);
    }
    assert_eq!(tokens, full, "{name}: greedy");
}

/// Three unrelated float32 evaluations stay within a quarter of these of the double one.
const MAX_ABS: f64 = 1e-4;
const MAX_RMS: f64 = 1e-5;

#[test]
fn a_seed_matches_with_the_configured_latent_eps() {
    check_fixture("a_seed", "logits_cfgeps.f32", 1e-5, 1e-5);
}

#[test]
fn b_dsa_full_matches() {
    check_fixture("b_dsa_full", "logits_gold.f32", MAX_ABS, MAX_RMS);
}

#[test]
fn d_groups_norm_matches() {
    check_fixture("d_groups_norm", "logits_gold.f32", MAX_ABS, MAX_RMS);
}

#[test]
fn e_odd_untied_matches() {
    check_fixture("e_odd_untied", "logits_gold.f32", MAX_ABS, MAX_RMS);
}

#[test]
fn g_bf16_sharded_matches() {
    check_fixture("g_bf16_sharded", "logits_gold.f32", MAX_ABS, MAX_RMS);
}

/// Full and shared indexer layers: full, full, shared, shared, full, shared.
#[test]
fn c_shared_matches() {
    check_fixture("c_shared", "logits_gold.f32", MAX_ABS, MAX_RMS);
}

#[test]
fn i_tied_bias_matches() {
    check_fixture("i_tied_bias", "logits_gold.f32", MAX_ABS, MAX_RMS);
}

/// Keys of older configurations: top-level rope_theta, counts and frequencies instead of lists,
/// and the head_dim that means nothing.
#[test]
fn j_legacy_matches() {
    check_fixture("j_legacy", "logits_gold.f32", MAX_ABS, MAX_RMS);
}

/// 600 tokens through a selection of 32.
#[test]
fn k_long_matches() {
    check_fixture("k_long", "logits_gold.f32", MAX_ABS, MAX_RMS);
}

#[test]
fn l_f16_matches() {
    check_fixture("l_f16", "logits_gold.f32", MAX_ABS, MAX_RMS);
}

/// The MTP layer of this directory is not part of the main model and must not disturb it.
#[test]
fn h_mtp_main_model_matches() {
    check_fixture("h_mtp", "logits_gold.f32", MAX_ABS, MAX_RMS);
}

/// `hidden.f32` is `[L+2, n, D]`: the stream before each layer, after the last, and normed.
#[test]
fn hidden_states_match_layer_by_layer() {
    struct Hidden {
        rows: Vec<Vec<f32>>,
    }
    impl Observer for Hidden {
        fn hidden(&mut self, layer: usize, _: usize, hidden: &[f32]) {
            self.rows[layer].extend_from_slice(hidden);
        }
    }
    for name in ["b_dsa_full", "e_odd_untied"] {
        let dir = fixture(name);
        let options = Options { chunk_rows: 1000, ..tight() };
        let engine = open(&dir, options);
        let full = integers(read_json(&dir.join("ref.json")).get("full_ids").unwrap());
        let want = read_floats(&dir.join("hidden.f32"));
        let (layers, width) = (engine.config().num_layers + 2, engine.config().hidden_size);
        let positions = want.len() / layers / width;
        let mut hidden = Hidden { rows: vec![Vec::new(); layers] };
        all_logits(&engine, &full, &mut hidden);
        let step = full.len() / positions;
        for (layer, rows) in hidden.rows.iter().enumerate() {
            for (n, want) in want[layer * positions * width..][..positions * width]
                .chunks_exact(width)
                .enumerate()
            {
                let got = &rows[n * step * width..][..width];
                let (max, _) = difference(got, want);
                assert!(max < 1e-4, "{name}: layer {layer}, position {}: {max:.2e}", n * step);
            }
        }
    }
}

/// Cutting a prompt into chunks, caching experts and resuming from a prefix change no bit.
#[test]
fn chunks_cache_and_prefix_reuse_give_the_same_bits() {
    for name in ["b_dsa_full", "c_shared", "d_groups_norm", "e_odd_untied"] {
        let dir = fixture(name);
        let full = integers(read_json(&dir.join("ref.json")).get("full_ids").unwrap());
        let bits = |logits: &[f32]| logits.iter().map(|l| l.to_bits()).collect::<Vec<_>>();
        let want = bits(&all_logits(&open(&dir, tight()), &full, &mut Unobserved));
        for (chunk_rows, limit) in
            [(1, Limit::SlotsPerLayer(1)), (7, Limit::SlotsPerLayer(3)), (1000, Limit::Available)]
        {
            let engine =
                open(&dir, Options { chunk_rows, limit, ctx_tokens: 256, ..Options::default() });
            let got = bits(&all_logits(&engine, &full, &mut Unobserved));
            assert!(got == want, "{name}: chunks of {chunk_rows}");
        }
        let engine = open(&dir, tight());
        let vocab = engine.config().vocab_size;
        let mut session = engine.session().unwrap();
        let mut other = full[..20].to_vec();
        other[15] = (other[15] + 1) % vocab as u32;
        session.advance(&full, &mut Unobserved).unwrap();
        session.advance(&other, &mut Unobserved).unwrap();
        for end in [16, 30, 30, full.len()] {
            let got = bits(session.advance(&full[..end], &mut Unobserved).unwrap());
            assert!(got == want[(end - 1) * vocab..end * vocab], "{name}: resumed at {end}");
        }
    }
}

/// A selection that holds every key equals dense attention: index_topk at and around the length.
#[test]
fn sparse_attention_with_room_for_every_key_is_dense() {
    let full =
        integers(read_json(&fixture("b_dsa_full").join("ref.json")).get("full_ids").unwrap());
    let logits = |topk: usize, length: usize| {
        let dir = TempDir::with_fixture(&format!("dense-{topk}-{length}"), "b_dsa_full");
        let path = dir.0.join("config.json");
        let text = std::fs::read_to_string(&path).unwrap();
        let changed = text.replace("\"index_topk\": 8", &format!("\"index_topk\": {topk}"));
        assert!(topk == 8 || changed != text, "the fixture's index_topk is 8");
        std::fs::write(&path, changed).unwrap();
        all_logits(&open(&dir.0, tight()), &full[..length], &mut Unobserved)
    };
    for length in [7, 8] {
        assert!(logits(8, length) == logits(4096, length), "length {length}");
    }
    // One more position: the first that is sparse; every earlier one is still dense.
    let (sparse, dense) = (logits(8, 9), logits(4096, 9));
    let vocab = dense.len() / 9;
    assert!(sparse[..8 * vocab] == dense[..8 * vocab]);
    assert!(sparse[8 * vocab..] != dense[8 * vocab..]);
    assert!(logits(9, 9) == dense);
}

/// `b_dsa_full` with the first element of `tensor` replaced; what a 12-token run says.
fn run_with(tensor: &str, value: f32) -> Result<(), String> {
    let name = format!("value-{}-{value}", tensor.replace('.', "-"));
    let dir = TempDir::with_fixture(&name, "b_dsa_full");
    let path = dir.0.join("model.safetensors");
    let mut tensors = read_safetensors(&path);
    let changed = tensors.iter_mut().find(|t| t.name == tensor).unwrap();
    changed.bytes[..4].copy_from_slice(&value.to_le_bytes());
    write_safetensors(&path, &tensors);
    let engine = open(&dir.0, tight());
    let mut session = engine.session().unwrap();
    session.advance(&[1; 12], &mut Unobserved).map(|_| ()).map_err(|e| e.to_string())
}

/// Non-finite weights reach router, index scores or logits: each is a named error, whichever of
/// the indexer's matrices they stand in, and also where a norm would hide them.
#[test]
fn non_finite_values_stop_with_layer_and_position() {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    let index = "layer 1: position 8: the index score of key";
    for (tensor, value, message) in [
        ("model.layers.2.mlp.gate.weight", nan, "layer 2: position 0: the router logit of expert"),
        ("lm_head.weight", nan, "position 11: the logit of token 0 is NaN"),
        ("model.layers.1.self_attn.indexer.weights_proj.weight", nan, index),
        ("model.layers.1.self_attn.indexer.wk.weight", nan, index),
        ("model.layers.1.self_attn.indexer.wk.weight", inf, index),
        ("model.layers.1.self_attn.indexer.wk.weight", 1e30, index),
        ("model.layers.1.self_attn.indexer.wq_b.weight", nan, index),
        ("model.layers.1.self_attn.indexer.wq_b.weight", inf, index),
        // Finite, but its square is not: the norm of the next layer must not turn it into zero.
        ("model.layers.0.mlp.down_proj.weight", 1e30, "position"),
    ] {
        let error = run_with(tensor, value).expect_err(tensor);
        assert!(error.contains(message), "{tensor} = {value}: {error}");
    }
    run_with("lm_head.weight", 0.5).unwrap();
}

/// A resumed timeline computes only what is new: counted by the positions that are routed.
#[test]
fn a_common_prefix_is_not_computed_again() {
    struct Positions(Vec<usize>);
    impl Observer for Positions {
        fn routed(&mut self, _: usize, position: usize, _: &[(u32, f32)]) {
            self.0.push(position);
        }
    }
    let engine = open(&fixture("a_seed"), tight());
    let mut session = engine.session().unwrap();
    let mut positions_of = |tokens: &[u32]| {
        let mut seen = Positions(Vec::new());
        session.advance(tokens, &mut seen).unwrap();
        seen.0.sort_unstable();
        seen.0.dedup();
        seen.0
    };
    assert_eq!(positions_of(&[1, 2, 3, 4]), [0, 1, 2, 3]);
    assert_eq!(positions_of(&[1, 2, 3, 4, 5]), [4]);
    assert_eq!(positions_of(&[1, 2, 9]), [2]);
    assert_eq!(positions_of(&[1, 2, 9]), [2]);
}

/// What is scored keeps what it has in common with the timeline before, up to where logits are
/// wanted again; logits are those of a whole pass, whatever the chunk.
#[test]
fn logits_from_a_position_recompute_nothing_before_it() {
    struct First(usize);
    impl Observer for First {
        fn routed(&mut self, _: usize, position: usize, _: &[(u32, f32)]) {
            self.0 = self.0.min(position);
        }
    }
    for chunk_rows in [2, 64] {
        let engine = open(&fixture("a_seed"), Options { chunk_rows, ..tight() });
        let mut session = engine.session().unwrap();
        for (tokens, first, computed_from) in [
            (&[1, 2, 3, 4, 5, 6][..], 3, 0),
            (&[1, 2, 3, 4, 9, 9, 9], 3, 3),
            (&[1, 2, 3, 8, 9], 4, 3),
            (&[1, 2, 3, 8, 9], 0, 0),
        ] {
            let (mut seen, mut logits) = (First(usize::MAX), Vec::new());
            let sink = |row: &[f32]| {
                logits.extend_from_slice(row);
                Ok(())
            };
            session.logits_from(tokens, first, &mut seen, sink).unwrap();
            assert_eq!(seen.0, computed_from, "{tokens:?} from {first}");
            let whole = all_logits(&engine, tokens, &mut Unobserved);
            assert!(logits == whole[first * 256..], "{tokens:?} from {first}: other logits");
        }
    }
}

/// A full context still gives one token, whether the prompt filled it or the reply did.
#[test]
fn generation_ends_by_length_behind_a_full_context() {
    let engine = open(&fixture("a_seed"), Options { ctx_tokens: 4, ..tight() });
    for prompt in [&[3, 14, 159, 26][..], &[3, 14][..]] {
        let mut sampler = Sampler::new(Params::GREEDY, 256, Vec::new()).unwrap();
        let mut new = 0;
        let finish =
            engine.session().unwrap().generate(prompt, 9, &mut sampler, &mut Unobserved, |_, _| {
                new += 1;
                Ok(true)
            });
        assert_eq!((finish.unwrap(), new), (Finish::Length, 5 - prompt.len()));
    }
}

#[test]
fn tokens_outside_the_vocabulary_and_the_context_are_refused() {
    let engine = open(&fixture("a_seed"), Options { ctx_tokens: 8, ..tight() });
    let mut session = engine.session().unwrap();
    let error = |result: colibri::error::Result<&[f32]>| result.unwrap_err().to_string();
    let too_large = error(session.advance(&[1, 256], &mut Unobserved));
    assert_eq!(too_large, "token 256 at position 1: the vocabulary has 256");
    let too_long = error(session.advance(&[1; 9], &mut Unobserved));
    assert_eq!(too_long, "9 tokens do not fit the context of 8 (see --ctx)");
    assert!(session.advance(&[1; 8], &mut Unobserved).is_ok());
}

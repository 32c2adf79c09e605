//! From tensor files to weights and experts: what is refused and by which words, the budget of
//! the expert store, and files that change under a running engine.

mod common;

use colibri::config::Config;
use colibri::disk::open_direct;
use colibri::engine::{Engine, Options};
use colibri::experts::ExpertStore;
use colibri::experts::view::View;
use colibri::kv::KvCache;
use colibri::memory::Available;
use colibri::model::Unobserved;
use colibri::plan::{Limit, Plan};
use colibri::safetensors::Directory;
use colibri::weights::{Mlp, Weights};
use common::{TempDir, TestTensor, fixture, read_safetensors, write_safetensors};
use std::sync::Arc;

fn options() -> Options {
    Options { ctx_tokens: 64, chunk_rows: 16, limit: Limit::SlotsPerLayer(1), ..Options::default() }
}

/// Opens `a_seed` after `change` was applied to its tensors; the error's text, if any.
fn open_changed(name: &str, change: impl FnOnce(&mut Vec<TestTensor>)) -> Result<(), String> {
    let dir = TempDir::with_fixture(name, "a_seed");
    let path = dir.0.join("model.safetensors");
    let mut tensors = read_safetensors(&path);
    change(&mut tensors);
    write_safetensors(&path, &tensors);
    Engine::open(&dir.0, options(), |_, _| {}).map(|_| ()).map_err(|e| e.to_string())
}

fn find<'a>(tensors: &'a mut [TestTensor], name: &str) -> &'a mut TestTensor {
    tensors.iter_mut().find(|tensor| tensor.name == name).unwrap()
}

#[test]
fn an_unchanged_copy_opens() {
    open_changed("same", |_| {}).unwrap();
}

#[test]
fn a_missing_tensor_is_named_with_its_expected_shape() {
    let name = "model.layers.3.mlp.experts.5.up_proj.weight";
    let error = open_changed("missing", |tensors| tensors.retain(|t| t.name != name)).unwrap_err();
    assert!(error.ends_with(&format!("tensor {name} is missing (expected shape [32, 128])")));
}

/// Some indexer tensors without the others: not a container without an indexer, but a broken one.
#[test]
fn a_half_present_indexer_is_refused_by_the_missing_name() {
    let name = "model.layers.4.self_attn.indexer.wk.weight";
    let error = open_changed("indexer", |tensors| tensors.retain(|t| t.name != name)).unwrap_err();
    assert!(error.contains(&format!("tensor {name} is missing")), "{error}");
}

#[test]
fn biases_that_the_configuration_denies_are_not_ignored() {
    let name = "model.layers.1.self_attn.o_proj.bias";
    let error = open_changed("bias", |tensors| {
        let (name, bytes) = (name.into(), vec![0; 128 * 4]);
        tensors.push(TestTensor { name, dtype: "F32", shape: vec![128], bytes });
    })
    .unwrap_err();
    assert!(error.contains(&format!("tensor {name} exists, but config.json")), "{error}");
}

#[test]
fn a_transposed_matrix_is_refused_with_both_shapes() {
    let error = open_changed("shape", |tensors| {
        find(tensors, "model.layers.0.self_attn.q_a_proj.weight").shape = vec![128, 64];
    })
    .unwrap_err();
    assert!(
        error.contains("q_a_proj.weight: expected shape [64, 128], found [128, 64]"),
        "{error}"
    );
}

#[test]
fn scales_of_the_wrong_size_are_refused_and_never_guessed() {
    for (weight_bytes, scale_bytes) in [(64 * 128, 63 * 4), (64 * 128 / 3, 64 * 4), (64 * 64, 0)] {
        let error = open_changed(&format!("scales-{weight_bytes}-{scale_bytes}"), |tensors| {
            let name = "model.layers.0.self_attn.q_a_proj.weight";
            let weight = find(tensors, name);
            (weight.dtype, weight.shape) = ("U8", vec![weight_bytes]);
            weight.bytes = vec![0; weight_bytes];
            tensors.push(TestTensor {
                name: format!("{name}.qs"),
                dtype: "F32",
                shape: vec![scale_bytes / 4],
                bytes: vec![0; scale_bytes],
            });
        })
        .unwrap_err();
        let sizes = format!("{weight_bytes} weight bytes with {scale_bytes} scale bytes");
        assert!(error.contains("q_a_proj.weight") && error.contains(&sizes), "{error}");
    }
}

#[test]
fn a_dtype_without_scales_is_refused_by_name() {
    let error = open_changed("dtype", |tensors| {
        let weight = find(tensors, "model.layers.0.mlp.up_proj.weight");
        (weight.dtype, weight.bytes) = ("I64", vec![0; 64 * 128 * 8]);
    })
    .unwrap_err();
    assert!(error.contains("up_proj.weight: dtype I64 is not a weight format"), "{error}");
}

#[test]
fn a_non_finite_norm_weight_is_refused_when_it_is_read() {
    let error = open_changed("nan", |tensors| {
        find(tensors, "model.norm.weight").bytes[8..12].copy_from_slice(&f32::NAN.to_le_bytes());
    })
    .unwrap_err();
    assert!(error.contains("tensor model.norm.weight: element 2 is NaN"), "{error}");
}

/// Every state of the store holds at most its budget, also while it reads; all experts come back
/// with the bytes that stand in the file.
#[test]
fn the_expert_store_never_exceeds_its_budget_and_returns_the_files_bytes() {
    for is_direct in [false, true] {
        check_store(is_direct);
    }
}

fn check_store(is_direct: bool) {
    let dir = fixture("d_groups_norm");
    let config = colibri::config::Config::load(&dir).unwrap();
    let mut directory = Directory::open(&dir).unwrap();
    if is_direct {
        // Where the file system has none, this is the same test again.
        directory.add_direct(open_direct);
    }
    let directory = Arc::new(directory);
    let weights = Weights::bind(&directory, &config).unwrap();
    let (layer, moe) = (weights.layers.iter().enumerate())
        .find_map(|(i, layer)| match &layer.mlp {
            Mlp::Sparse(moe) => Some((i, moe)),
            Mlp::Dense(_) => None,
        })
        .unwrap();
    let expert_bytes = moe.experts[0].bytes();
    let budget_bytes = 3 * expert_bytes + 1;
    let mut store = ExpertStore::new(budget_bytes, expert_bytes).unwrap();
    let view = Arc::new(View::new((0..=layer).map(|_| moe.experts.len())));
    store.show(Arc::clone(&view));
    let file = read_safetensors(&dir.join("model.safetensors"));
    // Two disjoint sets in turn, then one that fits.
    let order = [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 3, 4, 5, 5, 4, 3];
    let mut present = 0;
    for e in order {
        store.visit(layer, moe.experts.len(), 1, [(e as u32, 1)].into_iter());
        present += store.is_present((layer, e)) as u64;
        assert_eq!(store.ask(&directory, layer, &[e as u32], &moe.experts), 1);
        while !store.is_present((layer, e)) {
            store.receive(true).unwrap();
        }
        let expert = store.expert((layer, e), &moe.experts[e]);
        for (part, matrix) in [("gate", expert.gate), ("up", expert.up), ("down", expert.down)] {
            let name = format!("model.layers.{layer}.mlp.experts.{e}.{part}_proj.weight");
            let want = &file.iter().find(|tensor| tensor.name == name).unwrap().bytes;
            assert!(matrix.weights == &want[..], "{name}, direct: {is_direct}");
        }
        assert!(store.held_bytes() <= budget_bytes);
        let digit = |other| u8::from(store.is_present((layer, other))) + 2 * u8::from(other == e);
        let digits: String = (0..moe.experts.len()).map(|e| digit(e).to_string()).collect();
        assert_eq!(view.layers().last(), Some(digits));
        store.give_up(layer, &[e as u32]);
        assert_eq!(view.counters().bytes_read, store.counters().bytes_read);
    }
    let counters = store.counters();
    assert_eq!((view.counters().hits, view.counters().misses), (counters.hits, counters.misses));
    assert_eq!((counters.hits, counters.misses), (present, 18 - present));
    // By hand: the three of the end are there when they come again, and whoever knew the order
    // would keep 0 and 1 of the first round and 5 of the second, which makes nine.
    assert!((3..=9).contains(&counters.hits), "{counters:?}");
    assert_eq!(counters.bytes_read, counters.misses * moe.experts[0].bytes() as u64);
    let error = ExpertStore::new(expert_bytes - 1, expert_bytes).err().unwrap().to_string();
    assert!(error.contains(&format!("one takes {expert_bytes}")), "{error}");
}

/// What is expected is read behind what is wanted, counts as a miss for whoever wants it before it
/// is there and as a hit later, and never takes the place of what is wanted.
#[test]
fn expected_experts_arrive_unasked_and_make_room_for_wanted_ones() {
    let dir = fixture("d_groups_norm");
    let config = Config::load(&dir).unwrap();
    let directory = Arc::new(Directory::open(&dir).unwrap());
    let weights = Weights::bind(&directory, &config).unwrap();
    let sparse = (weights.layers.iter().enumerate()).filter_map(|(i, layer)| match &layer.mlp {
        Mlp::Sparse(moe) => Some((i, moe)),
        Mlp::Dense(_) => None,
    });
    let (layer, moe) = sparse.last().unwrap();
    let expert_bytes = moe.experts[0].bytes();
    let mut store = ExpertStore::new(3 * expert_bytes, expert_bytes).unwrap();
    store.expect(&directory, layer, &[1, 4], &moe.experts);
    while !(store.is_present((layer, 1)) && store.is_present((layer, 4))) {
        store.receive(true).unwrap();
    }
    assert_eq!((store.counters().hits, store.counters().misses), (0, 0));
    assert_eq!(store.ask(&directory, layer, &[1], &moe.experts), 1);
    assert_eq!((store.counters().hits, store.counters().misses), (1, 0));
    // Four are wanted, three fit: the expected one gives way, the wanted one stays.
    assert_eq!(store.ask(&directory, layer, &[2, 3, 5], &moe.experts), 2);
    assert!(store.is_present((layer, 1)) && !store.is_present((layer, 4)));
    // Nothing may be evicted now, so nothing is expected either.
    store.expect(&directory, layer, &[0], &moe.experts);
    assert_eq!(store.held_bytes(), 3 * expert_bytes);
    store.give_up_all();
    assert_eq!(store.ask(&directory, layer, &[0, 4, 5], &moe.experts), 3);
    for e in [0, 4, 5] {
        while !store.is_present((layer, e)) {
            store.receive(true).unwrap();
        }
    }
}

/// The shard loses a byte while the engine runs: the request fails with file, tensor, offset and
/// counts; nothing panics and nothing is served from a half-read buffer.
#[test]
fn a_shard_that_shrinks_under_a_running_engine_is_a_named_short_read() {
    let dir = TempDir::with_fixture("shrink", "a_seed");
    let engine = Engine::open(&dir.0, options(), |_, _| {}).unwrap();
    let path = dir.0.join("model.safetensors");
    let header = std::fs::metadata(&path).unwrap().len();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(header / 3).unwrap();
    let mut session = engine.session().unwrap();
    let error = session.advance(&[1, 2, 3], &mut Unobserved).err().unwrap().to_string();
    for part in ["model.safetensors", "ends too soon", "wanted", "at offset", "got"] {
        assert!(error.contains(part), "{part:?} in {error}");
    }
    // The next request finds a whole file again, and an engine that is as good as new.
    std::fs::copy(fixture("a_seed").join("model.safetensors"), &path).unwrap();
    let whole = Engine::open(&fixture("a_seed"), options(), |_, _| {}).unwrap();
    let mut fresh = whole.session().unwrap();
    let mut session = engine.session().unwrap();
    let logits = session.advance(&[1, 2, 3], &mut Unobserved).unwrap();
    assert_eq!(logits, fresh.advance(&[1, 2, 3], &mut Unobserved).unwrap());
}

/// Counted by hand from the shapes of `c_shared`, all of it f32: 6 layers, 3 of them with an
/// indexer, 2 dense, 4 sparse with 6 experts each; hidden 24.
#[test]
fn the_plan_counts_the_bytes_that_a_person_counts() {
    let dir = fixture("c_shared");
    let config = Config::load(&dir).unwrap();
    let weights = Weights::bind(&Directory::open(&dir).unwrap(), &config).unwrap();
    // Per position: latent 12 and rotary key 4 on every layer, index key 8 (padded to 16 floats)
    // on three.
    let kv_bytes = KvCache::bytes(&config, &weights.index_layers(), 100);
    assert_eq!(kv_bytes, 4 * 100 * (6 * 16 + 3 * 16));
    let attention = 16 * 24 + 30 * 16 + 16 * 24 + 42 * 12 + 24 * 24;
    let indexer = 64 * 16 + 8 * 24 + 8 * 24;
    let (dense, expert, router, head) = (3 * 24 * 28, 3 * 24 * 8, 6 * 24, 64 * 24);
    let resident = 6 * attention + 3 * indexer + 2 * dense + 4 * (router + expert) + head;
    // kv_b is 2016 bytes; what follows it starts at the next multiple of 64.
    let resident_bytes = 4 * resident + 6 * 32;
    let context_bytes = |tokens| (tokens * 576, 1000);
    let plan = |limit| Plan::new(&weights, 100, context_bytes, limit, None);
    let two_slots = plan(Limit::SlotsPerLayer(2)).unwrap();
    let want = Plan {
        ram_bytes: resident_bytes + 57_600 + 1000 + 2 * 4 * 4 * expert,
        resident_bytes,
        kv_bytes: 57_600,
        scratch_bytes: 1000,
        expert_bytes: 2 * 4 * 4 * expert,
        largest_expert_bytes: 4 * expert,
    };
    assert_eq!(two_slots, want);
    let all = plan(Limit::SlotsPerLayer(1000)).unwrap();
    assert_eq!(all.expert_bytes, 6 * 4 * 4 * expert);
    // The smallest budget that holds one expert, and a byte less.
    let least_bytes = resident_bytes + 57_600 + 1000 + 4 * expert;
    let least = plan(Limit::RamBytes(least_bytes)).unwrap();
    assert_eq!((least.expert_bytes, least.total_bytes()), (4 * expert, least_bytes));
    assert!(plan(Limit::RamBytes(least_bytes - 1)).is_err());
}

#[test]
fn a_budget_that_cannot_hold_the_model_is_refused_with_the_number_that_would() {
    let options = Options { limit: Limit::RamBytes(1_000_000), ..options() };
    let read = |bytes, _| panic!("{bytes} bytes of weights are read before the refusal");
    let error = Engine::open(&fixture("a_seed"), options, read).err().unwrap().to_string();
    assert!(error.contains("does not fit in 1.0 MB") && error.contains("--ram"), "{error}");
}

/// `c_shared` again: 106,752 bytes resident, experts of 2304 in 4 layers of 6. A context of a
/// megabyte for each token stands in for a large one.
#[test]
fn a_refusal_names_what_bounds_it_and_flags_that_just_fit() {
    let dir = fixture("c_shared");
    let config = Config::load(&dir).unwrap();
    let weights = Weights::bind(&Directory::open(&dir).unwrap(), &config).unwrap();
    let plan = |tokens, token_bytes, limit, available_bytes: Option<usize>| {
        let free = available_bytes.map(|bytes| Available { bytes, bound: "/g/memory.max".into() });
        let context_bytes = |tokens| (tokens * token_bytes, 1000);
        Plan::new(&weights, tokens, context_bytes, limit, free.as_ref())
    };
    let refusal = |tokens, token_bytes, limit, available_bytes| {
        let error = plan(tokens, token_bytes, limit, available_bytes).unwrap_err().to_string();
        let (why, remedy) =
            error.split_once(if error.contains("; ") { "; " } else { ": " }).unwrap();
        (why.to_string(), remedy.to_string())
    };
    let (ram, cap, mb) = (Limit::RamBytes, Limit::SlotsPerLayer, 1_000_000);
    // At least 3000 MB + 106,752 + 1000 + 2304.
    let (why, remedy) = refusal(3000, mb, ram(2000 * mb), None);
    assert!(why.starts_with("the model does not fit in 2.0 GB: it needs at least 3.0 GB"), "{why}");
    assert_eq!(remedy, "give --ram 3.000110056 or more, or give --ctx 1999 or less");
    let (why, remedy) = refusal(3000, mb, ram(2000 * mb), Some(1500 * mb));
    assert!(why.contains("does not fit in 1.5 GB (/g/memory.max): it needs"), "{why}");
    let room = "make room for --ram 3.000110056 (1.5 GB are left: /g/memory.max)";
    assert_eq!(remedy, format!("{room}, or give --ctx 1499 or less"));
    // Here --ram is what bounds the context, and still not all that is in the way.
    let (why, remedy) = refusal(3000, mb, ram(1200 * mb), Some(1500 * mb));
    assert!(why.contains("does not fit in 1.2 GB: it needs"), "{why}");
    assert_eq!(remedy, format!("{room}, or give --ctx 1199 or less"));
    let (why, remedy) = refusal(3000, mb, Limit::Available, Some(3200 * mb));
    assert!(why.contains("does not fit in 2.7 GB (85 % of 3.2 GB: /g/memory.max)"), "{why}");
    assert_eq!(remedy, "give --ram 3.000110056 or more, or give --ctx 2719 or less");
    // No context is small enough.
    let (_, remedy) = refusal(3000, mb, ram(100_000), None);
    assert_eq!(remedy, "give --ram 3.000110056 or more");
    // 107,752 + 57,600 + 6 · 9216 = 220,648, of which 200,000 leave 34,648 for slots of 9216, or
    // 36,952 for tokens of 576.
    let (why, remedy) = refusal(100, 576, cap(6), Some(200_000));
    assert_eq!(why, "the plan needs 0.2 MB, but 0.2 MB are left (/g/memory.max)");
    assert_eq!(remedy, "give --cap 3 or less, or give --ctx 64 or less");
    assert!(plan(100, 576, cap(3), Some(200_000)).is_ok());
    assert!(plan(64, 576, cap(6), Some(200_000)).is_ok());
    assert!(plan(65, 576, cap(6), Some(200_000)).is_err());
    let (_, remedy) = refusal(100, 576, ram(mb), Some(200_000));
    assert_eq!(remedy, "give --ram 0.0002 or less");
    assert_eq!(plan(100, 576, ram(200_000), Some(200_000)).unwrap().total_bytes(), 200_000);
}

/// Another model family is refused before any shard is opened.
#[test]
fn another_model_type_is_refused_before_weights_are_opened() {
    let dir = TempDir::new("family");
    std::fs::write(dir.0.join("config.json"), r#"{"model_type":"llama"}"#).unwrap();
    std::fs::write(dir.0.join("model.safetensors"), b"not a tensor file").unwrap();
    let error = Engine::open(&dir.0, options(), |_, _| {}).err().unwrap().to_string();
    assert!(error.contains("llama") && error.contains("glm_moe_dsa"), "{error}");
}

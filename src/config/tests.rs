//! Tests of the config reader, against configs as published and as a reference tool writes them.

use super::*;
use IndexerKind::{Full, Shared};
use MlpKind::{Dense, Sparse};

/// The inference fields of the official FP8 checkpoint, with its misleading `head_dim`.
const GLM_5_2: &str = r#"{
    "architectures": ["GlmMoeDsaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "dtype": "bfloat16", "eos_token_id": [154820, 154827, 154829], "ep_size": 1,
    "first_k_dense_replace": 3, "head_dim": 192, "hidden_act": "silu", "hidden_size": 6144,
    "index_head_dim": 128, "index_n_heads": 32, "index_share_for_mtp_iteration": true,
    "index_skip_topk_offset": 3, "index_topk": 2048, "index_topk_freq": 4,
    "index_topk_pattern": null, "indexer_rope_interleave": true, "initializer_range": 0.02,
    "intermediate_size": 12288, "kv_lora_rank": 512, "max_position_embeddings": 1048576,
    "model_type": "glm_moe_dsa", "moe_intermediate_size": 2048, "moe_layer_freq": 1,
    "moe_router_dtype": "float32", "n_group": 1, "n_routed_experts": 256, "n_shared_experts": 1,
    "norm_topk_prob": true, "num_attention_heads": 64, "num_experts_per_tok": 8,
    "num_hidden_layers": 78, "num_key_value_heads": 64, "num_nextn_predict_layers": 1,
    "pad_token_id": 154820, "pretraining_tp": 1, "q_lora_rank": 2048, "qk_head_dim": 256,
    "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
    "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3",
        "modules_to_not_convert": ["lm_head"], "quant_method": "fp8",
        "weight_block_size": [128, 128]},
    "rms_norm_eps": 1e-05, "rope_interleave": true,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": false,
    "topk_group": 1, "topk_method": "noaux_tc", "transformers_version": "5.12.0",
    "use_cache": true, "v_head_dim": 256, "vocab_size": 154880}"#;

/// Written by transformers 5.14.1 for a small random model, one line as its `to_json_string` gives.
const SMALL: &str = r#"{"transformers_version": "5.14.1", "architectures": ["GlmMoeDsaForCausalLM"],
    "output_hidden_states": false, "return_dict": true, "dtype": "float32",
    "chunk_size_feed_forward": 0, "is_encoder_decoder": false, "id2label": {"0": "LABEL_0",
    "1": "LABEL_1"}, "label2id": {"LABEL_0": 0, "LABEL_1": 1}, "problem_type": null,
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 64, "moe_intermediate_size": 32,
    "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 4,
    "n_shared_experts": 1, "n_routed_experts": 8, "routed_scaling_factor": 2.5,
    "kv_lora_rank": 32, "q_lora_rank": 64, "qk_rope_head_dim": 8, "v_head_dim": 32,
    "qk_nope_head_dim": 24, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
    "norm_topk_prob": true, "hidden_act": "silu", "max_position_embeddings": 4096,
    "initializer_range": 0.02, "rms_norm_eps": 1e-05, "use_cache": true, "pad_token_id": null,
    "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": false,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "mlp_layer_types": ["dense", "dense", "dense", "sparse", "sparse"], "attention_bias": false,
    "attention_dropout": 0.0, "index_topk": 4096, "index_head_dim": 16, "index_n_heads": 2,
    "mlp_bias": false, "head_dim": 8, "first_k_dense_replace": 3,
    "layer_types": ["deepseek_sparse_attention", "deepseek_sparse_attention",
    "deepseek_sparse_attention", "deepseek_sparse_attention", "deepseek_sparse_attention"],
    "indexer_types": ["full", "full", "full", "full", "full"], "qk_head_dim": 32,
    "_name_or_path": "", "model_type": "glm_moe_dsa", "output_attentions": false}"#;

fn parse(text: &str) -> Value {
    json::parse(text.as_bytes(), Limits::default()).unwrap()
}

/// `base` with the fields of the object `changes` set; a field set to `"absent"` is removed.
fn changed(base: &str, changes: &str) -> Result<Config> {
    let Value::Object(mut members) = parse(base) else { unreachable!() };
    let Value::Object(changes) = parse(changes) else { unreachable!() };
    for (name, value) in changes {
        members.retain(|(known, _)| *known != name);
        if value.as_str() != Some("absent") {
            members.push((name, value));
        }
    }
    Config::from_json(&Value::Object(members))
}

fn small(changes: &str) -> Config {
    changed(SMALL, changes).unwrap()
}

fn refusal(changes: &str) -> String {
    match changed(SMALL, changes) {
        Ok(_) => panic!("accepted {changes}"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn glm_5_2_reads_as_published() {
    let config = Config::from_json(&parse(GLM_5_2)).unwrap();
    // 0, 1, 2, then every fourth layer from 6 to 74.
    let full: Vec<usize> = (0..78).filter(|&layer| config.indexer[layer] == Full).collect();
    let expected: Vec<usize> = [0, 1].into_iter().chain((2..=74).step_by(4)).collect();
    assert_eq!((full.len(), full), (21, expected));
    assert_eq!(config.mlp, [vec![Dense; 3], vec![Sparse; 75]].concat());
    assert_eq!(config.qk_head_dim(), 256, "head_dim must not count");
    let found = Config { indexer: vec![], mlp: vec![], ..config };
    let expected = Config {
        vocab_size: 154_880,
        hidden_size: 6144,
        intermediate_size: 12_288,
        moe_intermediate_size: 2048,
        num_layers: 78,
        num_heads: 64,
        n_routed_experts: 256,
        n_shared_experts: 1,
        top_k: 8,
        n_group: 1,
        topk_group: 1,
        norm_topk_prob: true,
        routed_scaling_factor: 2.5,
        q_lora_rank: 2048,
        kv_lora_rank: 512,
        qk_nope_head_dim: 192,
        qk_rope_head_dim: 64,
        v_head_dim: 256,
        index_topk: 2048,
        index_head_dim: 128,
        index_n_heads: 32,
        indexer: vec![],
        mlp: vec![],
        rms_norm_eps: 1e-5,
        rope_theta: 8e6,
        attention_bias: false,
        tie_word_embeddings: false,
        eos_token_ids: vec![154_820, 154_827, 154_829],
        max_position_embeddings: 1_048_576,
        num_nextn_predict_layers: 1,
        index_share_for_mtp_iteration: true,
        quantization: Some(Quantization::Fp8 { block_rows: 128, block_columns: 128 }),
    };
    assert_eq!(found, expected);
}

#[test]
fn config_written_by_transformers_reads_and_defaults_are_its_own() {
    let config = small("{}");
    assert_eq!(config.indexer, [Full; 5]);
    assert_eq!(config.mlp, [Dense, Dense, Dense, Sparse, Sparse]);
    assert_eq!((config.eos_token_ids, config.rope_theta), (vec![1], 10_000.0));
    assert_eq!((config.num_nextn_predict_layers, config.quantization), (0, None));
    let config = small(
        r#"{"n_group":"absent","topk_group":null,"norm_topk_prob":"absent","eos_token_id":null,
        "routed_scaling_factor":null,"rms_norm_eps":null,"rope_parameters":null,
        "attention_bias":null,"tie_word_embeddings":null,"max_position_embeddings":null,
        "hidden_act":null,"num_key_value_heads":null,"indexer_types":null,
        "mlp_layer_types":null,"first_k_dense_replace":null}"#,
    );
    assert_eq!((config.n_group, config.topk_group, config.norm_topk_prob), (1, 1, true));
    assert_eq!((config.routed_scaling_factor, config.rms_norm_eps), (2.5, 1e-5));
    assert_eq!((config.rope_theta, config.max_position_embeddings), (10_000.0, 202_752));
    assert!(!config.attention_bias && !config.tie_word_embeddings);
    assert_eq!((config.indexer, config.eos_token_ids), (vec![Full; 5], vec![]));
    assert_eq!(config.mlp, [Dense, Dense, Dense, Sparse, Sparse]);
}

#[test]
fn another_model_type_is_refused_before_anything_else() {
    let read = |text: &str| Config::from_json(&parse(text)).unwrap_err().to_string();
    let other = r#"{"hidden_size":"x","model_type":"deepseek_v32"}"#;
    assert_eq!(read(other), "model_type: expected glm_moe_dsa, found \"deepseek_v32\"");
    assert_eq!(read("{}"), "model_type is missing; expected glm_moe_dsa");
    assert_eq!(read("[]"), "config: expected an object, found an array");
    assert_eq!(read("7"), "config: expected an object, found 7");
}

#[test]
fn every_dimension_is_named_when_missing_or_wrong() {
    for name in [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "moe_intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "n_routed_experts",
        "n_shared_experts",
        "num_experts_per_tok",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "index_topk",
        "index_head_dim",
        "index_n_heads",
    ] {
        for absent in ["\"absent\"", "null"] {
            let message = refusal(&format!("{{\"{name}\":{absent}}}"));
            let expected = format!("{name} is missing; expected an integer from ");
            assert!(message.starts_with(&expected), "{message}");
        }
        for wrong in ["-1", "18446744073709551616", "1e3", "8.0", "\"8\"", "true", "[8]", "{}"] {
            let message = refusal(&format!("{{\"{name}\":{wrong}}}"));
            let expected = format!("{name}: expected an integer from ");
            assert!(message.starts_with(&expected), "{wrong}: {message}");
        }
        assert!(refusal(&format!("{{\"{name}\":16777217}}")).starts_with(&format!("{name}: ")));
    }
    assert_eq!(
        refusal(r#"{"hidden_size":0}"#),
        "hidden_size: expected an integer from 1 to 1048576, found 0"
    );
    let long = format!("{{\"hidden_size\":\"{}\"}}", "é".repeat(100_000));
    assert!(refusal(&long).len() < 300);
}

#[test]
fn flags_and_factors_of_the_wrong_kind_are_refused() {
    for (changes, expected) in [
        (r#"{"norm_topk_prob":1}"#, "norm_topk_prob: expected true or false, found 1"),
        (r#"{"attention_bias":"false"}"#, "attention_bias: expected true or false"),
        (r#"{"rms_norm_eps":0}"#, "rms_norm_eps: expected a number from 1e-12 to 1e-1, found 0"),
        (r#"{"rms_norm_eps":"1e-5"}"#, "rms_norm_eps: expected a number"),
        (r#"{"routed_scaling_factor":-2.5}"#, "routed_scaling_factor: expected a number"),
        (r#"{"eos_token_id":-1}"#, "eos_token_id: expected token ids below 2^32, found -1"),
        (r#"{"eos_token_id":[1,4294967296]}"#, "eos_token_id: expected token ids below 2^32"),
        (r#"{"eos_token_id":[[1]]}"#, "eos_token_id: expected token ids"),
    ] {
        let message = refusal(changes);
        assert!(message.starts_with(expected), "{changes}: {message}");
    }
    assert_eq!(small(r#"{"eos_token_id":[7,7,5]}"#).eos_token_ids, [7, 5]);
    assert_eq!(small(r#"{"routed_scaling_factor":1}"#).routed_scaling_factor, 1.0);
}

#[test]
fn fields_that_change_the_maths_are_refused_by_name() {
    for (changes, expected) in [
        (r#"{"hidden_act":"gelu"}"#, "hidden_act: expected \"silu\" (no other is implemented)"),
        (r#"{"scoring_func":"softmax"}"#, "scoring_func: expected \"sigmoid\""),
        (r#"{"topk_method":"greedy"}"#, "topk_method: expected \"noaux_tc\""),
        (r#"{"moe_layer_freq":2}"#, "moe_layer_freq: expected 1"),
        (r#"{"rope_interleave":false}"#, "rope_interleave: expected true"),
        (r#"{"indexer_rope_interleave":false}"#, "indexer_rope_interleave: expected true"),
        (r#"{"num_key_value_heads":2}"#, "num_key_value_heads: expected 4, as num_attention_heads"),
        (r#"{"qk_rope_head_dim":7}"#, "qk_rope_head_dim: expected an even number, found 7"),
        (r#"{"index_head_dim":6}"#, "index_head_dim: expected at least qk_rope_head_dim, 8"),
        (r#"{"partial_rotary_factor":0.5}"#, "partial_rotary_factor: expected"),
    ] {
        let message = refusal(changes);
        assert!(message.starts_with(expected), "{changes}: {message}");
    }
    assert_eq!(small(r#"{"head_dim":192,"qk_head_dim":5}"#), small("{}"));
}

#[test]
fn legacy_rope_keys_are_folded_in_and_scaled_ropes_refused() {
    let theta = |changes: &str| small(changes).rope_theta;
    assert_eq!(theta(r#"{"rope_parameters":null,"rope_theta":1000000}"#), 1e6);
    assert_eq!(theta(r#"{"rope_theta":5e5}"#), 1e4, "the object wins over the top level");
    assert_eq!(theta(r#"{"rope_parameters":{},"rope_theta":5e5,"rope_scaling":null}"#), 5e5);
    let scaling = r#"{"rope_parameters":null,"rope_theta":5,"rope_scaling":{"type":"default"}}"#;
    assert_eq!(theta(scaling), 5.0);
    let scaling = r#"{"rope_parameters":null,"rope_scaling":{"rope_theta":77.5}}"#;
    assert_eq!(theta(scaling), 77.5);
    for (changes, expected) in [
        (
            r#"{"rope_parameters":{"rope_type":"yarn","factor":4}}"#,
            "rope_parameters.rope_type: expected \"default\" (no other is implemented), found \
             \"yarn\"",
        ),
        (r#"{"rope_scaling":{"type":"linear"}}"#, "rope_scaling.type: expected \"default\""),
        (r#"{"rope_parameters":[1]}"#, "rope_parameters: expected an object, found an array"),
        (r#"{"rope_parameters":{"rope_theta":"1e4"}}"#, "rope_parameters.rope_theta: expected a"),
        (r#"{"rope_parameters":{"rope_theta":-1}}"#, "rope_parameters.rope_theta: expected a"),
        (r#"{"rope_parameters":null,"rope_theta":0}"#, "rope_theta: expected a number"),
        (
            r#"{"rope_parameters":{"full_attention":{"rope_theta":1e6}}}"#,
            "rope_parameters.full_attention: expected a plain value, found an object",
        ),
    ] {
        let message = refusal(changes);
        assert!(message.starts_with(expected), "{changes}: {message}");
    }
}

#[test]
fn indexer_list_wins_over_pattern_over_frequency() {
    let kinds = |changes: &str| small(changes).indexer;
    let rest = r#""index_topk_pattern":"FSFSF","index_topk_freq":4,"index_skip_topk_offset":3"#;
    let list = r#"["full","shared","shared","shared","full"]"#;
    assert_eq!(
        kinds(&format!("{{\"indexer_types\":{list},{rest}}}")),
        [Full, Shared, Shared, Shared, Full]
    );
    assert_eq!(
        kinds(&format!("{{\"indexer_types\":null,{rest}}}")),
        [Full, Shared, Full, Shared, Full]
    );
    assert_eq!(
        kinds(&format!("{{\"indexer_types\":null,\"index_topk_pattern\":{list}}}")),
        [Full, Shared, Shared, Shared, Full]
    );
    let freq = |freq: usize, offset: &str| {
        let fields = format!("\"index_topk_freq\":{freq},\"index_skip_topk_offset\":{offset}");
        kinds(&format!("{{\"indexer_types\":null,{fields}}}"))
    };
    assert_eq!(freq(1, "3"), [Full; 5]);
    // max(i - 2 + 1, 0) mod 3 for i = 0..5 is 0, 0, 1, 2, 0.
    assert_eq!(freq(3, "null"), [Full, Full, Shared, Shared, Full]);
    // max(i - 4 + 1, 0) mod 2 is 0, 0, 0, 0, 1.
    assert_eq!(freq(2, "4"), [Full, Full, Full, Full, Shared]);
}

#[test]
fn unusable_indexer_and_mlp_lists_are_refused() {
    for (changes, expected) in [
        (
            r#"{"indexer_types":["shared","full","full","full","full"]}"#,
            "indexer_types: layer 0 is shared",
        ),
        (r#"{"indexer_types":null,"index_topk_pattern":"SFFFF"}"#, "index_topk_pattern: layer 0"),
        (
            // max(0 - 0 + 1, 0) mod 2 is 1.
            r#"{"indexer_types":null,"index_topk_freq":2,"index_skip_topk_offset":0}"#,
            "index_topk_freq and index_skip_topk_offset: layer 0 is shared",
        ),
        (
            r#"{"indexer_types":["full"]}"#,
            "indexer_types: expected 5 entries, one per layer, found 1",
        ),
        (
            r#"{"indexer_types":["full","full","full","full","Full"]}"#,
            "indexer_types[4]: expected \"full\" or \"shared\", found \"Full\"",
        ),
        (r#"{"indexer_types":"full"}"#, "indexer_types: expected a list of \"full\" or"),
        (
            r#"{"indexer_types":null,"index_topk_pattern":"FFFF"}"#,
            "index_topk_pattern: expected 5 letters, one per layer, found 4",
        ),
        (
            r#"{"indexer_types":null,"index_topk_pattern":"FFfFF"}"#,
            "index_topk_pattern: expected the letters F and S, found 'f'",
        ),
        (r#"{"indexer_types":null,"index_topk_pattern":5}"#, "index_topk_pattern: expected a list"),
        (r#"{"indexer_types":null,"index_topk_freq":0}"#, "index_topk_freq: expected an integer"),
        (r#"{"mlp_layer_types":["dense"]}"#, "mlp_layer_types: expected 5 entries"),
        (
            r#"{"mlp_layer_types":["dense","moe","sparse","sparse","sparse"]}"#,
            "mlp_layer_types[1]: expected \"dense\" or \"sparse\", found \"moe\"",
        ),
    ] {
        let message = refusal(changes);
        assert!(message.starts_with(expected), "{changes}: {message}");
    }
}

#[test]
fn mlp_list_wins_over_the_count_of_dense_layers() {
    let kinds = |changes: &str| small(changes).mlp;
    let list = r#"["sparse","dense","sparse","dense","sparse"]"#;
    assert_eq!(
        kinds(&format!("{{\"mlp_layer_types\":{list},\"first_k_dense_replace\":5}}")),
        [Sparse, Dense, Sparse, Dense, Sparse]
    );
    let count = |count: usize| {
        kinds(&format!("{{\"mlp_layer_types\":null,\"first_k_dense_replace\":{count}}}"))
    };
    assert_eq!(count(0), [Sparse; 5]);
    assert_eq!(count(1), [Dense, Sparse, Sparse, Sparse, Sparse]);
    assert_eq!(count(100), [Dense; 5]);
}

#[test]
fn router_numbers_must_fit_each_other() {
    for (changes, expected) in [
        (r#"{"num_experts_per_tok":9}"#, "num_experts_per_tok: expected at most 8 (1 of 1 groups"),
        (r#"{"n_group":3}"#, "n_group: expected a divisor of the 8 routed experts, found 3"),
        (r#"{"n_group":8}"#, "n_group: expected groups of at least 2"),
        (r#"{"n_group":2,"topk_group":3}"#, "topk_group: expected at most n_group, 2, found 3"),
        (
            r#"{"n_group":4,"topk_group":2,"num_experts_per_tok":5}"#,
            "num_experts_per_tok: expected at most 4 (2 of 4 groups of 8 routed experts), found 5",
        ),
        (r#"{"num_experts":16}"#, "num_experts: expected 8, as n_routed_experts, found 16"),
    ] {
        let message = refusal(changes);
        assert!(message.starts_with(expected), "{changes}: {message}");
    }
    let config = small(r#"{"n_group":4,"topk_group":2,"num_experts_per_tok":4}"#);
    assert_eq!((config.n_group, config.topk_group, config.top_k), (4, 2, 4));
    let alias = r#"{"n_routed_experts":"absent","num_local_experts":8}"#;
    assert_eq!(small(alias).n_routed_experts, 8);
    assert_eq!(small(r#"{"n_shared_experts":2}"#).n_shared_experts, 2);
}

#[test]
fn quantization_entry_is_a_hint_and_malformed_blocks_are_refused() {
    let read = |entry: &str| changed(SMALL, &format!("{{\"quantization_config\":{entry}}}"));
    let quant = |entry: &str| read(entry).unwrap().quantization.unwrap();
    assert_eq!(
        quant(r#"{"quant_method":"fp8","weight_block_size":[64,32]}"#),
        Quantization::Fp8 { block_rows: 64, block_columns: 32 }
    );
    assert_eq!(quant(r#"{"quant_method":"modelopt","quant_algo":"NVFP4"}"#), Quantization::Nvfp4);
    assert_eq!(quant(r#"{"quant_method":"gptq"}"#), Quantization::Other("gptq".into()));
    assert_eq!(
        quant(r#"{"quant_method":"fp8","fmt":"e5m2","weight_block_size":[128,128]}"#),
        Quantization::Other("fp8 e5m2".into())
    );
    for block in ["[128]", "[0,128]", "[128,-1]", "[128,128.0]", "128", "[65537,1]"] {
        let entry = format!("{{\"quant_method\":\"fp8\",\"weight_block_size\":{block}}}");
        let message = read(&entry).unwrap_err().to_string();
        let expected = "quantization_config.weight_block_size: expected two integers from 1";
        assert!(message.starts_with(expected), "{message}");
    }
    let message = read(r#"{"quant_method":8}"#).unwrap_err().to_string();
    assert_eq!(message, "quantization_config.quant_method: expected a string, found 8");
}

#[test]
fn loading_joins_the_stop_ids_and_names_the_bad_file() {
    let dir = std::env::temp_dir().join(format!("colibri-config-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let load = || Config::load(&dir).map_err(|error| error.to_string());
    assert!(load().unwrap_err().contains("config.json: "));
    std::fs::write(dir.join("config.json"), SMALL).unwrap();
    assert_eq!(load().unwrap().eos_token_ids, [1]);
    let write = |text: &[u8]| std::fs::write(dir.join("generation_config.json"), text).unwrap();
    write(br#"{"eos_token_id":[3,1,2],"temperature":1.0}"#);
    assert_eq!(load().unwrap().eos_token_ids, [1, 3, 2]);
    write(br#"{"eos_token_id":[3,}"#);
    assert!(load().unwrap_err().contains("generation_config.json: expected a value, found '}'"));
    std::fs::remove_file(dir.join("generation_config.json")).unwrap();
    std::fs::write(dir.join("config.json"), vec![b' '; FILE_BYTES_MAX + 2]).unwrap();
    let message = load().unwrap_err();
    assert!(message.contains("config.json: expected at most 16777216 bytes, found 16777218"));
    std::fs::remove_dir_all(&dir).unwrap();
}

//! Sampling against probabilities written down by hand, and against a naive twin.

#![forbid(unsafe_code)]

use super::*;

const PLAIN: Params = Params { temperature: 1.0, ..Params::GREEDY };

fn sampler(params: Params) -> Sampler {
    Sampler::new(params, Vec::new()).unwrap()
}

/// Logits whose softmax is `probabilities`.
fn logs(probabilities: &[f32]) -> Vec<f32> {
    probabilities.iter().map(|p| p.ln()).collect()
}

/// The tokens that 3,000 draws meet, ascending.
fn kept(logits: &[f32], params: Params) -> Vec<u32> {
    let mut sampler = sampler(params);
    let mut seen: Vec<u32> = (0..3000).map(|i| sampler.sample(logits, i).unwrap()).collect();
    seen.sort_unstable();
    seen.dedup();
    seen
}

/// Chi-square of `draws` draws against the expected probabilities.
fn chi_square(sampler: &mut Sampler, logits: &[f32], expected: &[f64], draws: usize) -> f64 {
    let mut counts = vec![0.0; expected.len()];
    for position in 0..draws {
        counts[sampler.sample(logits, position).unwrap() as usize] += 1.0;
    }
    for (token, (count, p)) in counts.iter().zip(expected).enumerate() {
        assert!(*p > 0.0 || *count == 0.0, "token {token} was cut and came up");
    }
    let kept = counts.iter().zip(expected).filter(|(_, p)| **p > 0.0);
    kept.map(|(count, p)| (count - p * draws as f64).powi(2) / (p * draws as f64)).sum()
}

#[test]
fn non_finite_logits_are_an_error_and_never_token_0() {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    for (logits, token) in [
        ([nan, 1.0, 2.0], 0),
        ([1.0, nan, 2.0], 1),
        ([nan, nan, nan], 0),
        ([0.0, 1.0, inf], 2),
        ([-inf, -inf, -inf], 0),
    ] {
        for params in [Params::GREEDY, PLAIN] {
            let error = sampler(params).sample(&logits, 0).unwrap_err().to_string();
            assert!(error.contains(&format!("logit of token {token} is")), "{error}");
        }
        assert!(argmax(&logits).is_err());
    }
    assert!(argmax(&[]).is_err());
    assert!(sampler(PLAIN).sample(&[], 0).is_err());
}

#[test]
fn ties_choose_the_lowest_id() {
    assert_eq!(argmax(&[1.0, 3.0, 3.0, 2.0]).unwrap(), 1);
    assert_eq!(argmax(&[-0.0, 0.0]).unwrap(), 0);
    let one = Params { top_k: 1, ..PLAIN };
    assert_eq!(kept(&[1.0, 3.0, 3.0], one), [1]);
    assert_eq!(kept(&[-0.0, 0.0], one), [0]);
    // The cut goes through a run of equals, also one longer than what is sorted at first.
    assert_eq!(kept(&[0.0, 2.0, 0.0, 0.0], Params { top_k: 3, ..PLAIN }), [0, 1, 2]);
    let flat = [1.0; 1000];
    let three = Params { top_k: 3, ..PLAIN };
    assert_eq!(kept(&flat, three), [0, 1, 2]);
}

/// At a high temperature both weights round to 1; the larger logit is still the better token.
#[test]
fn the_best_of_one_is_the_greedy_token_although_weights_round_together() {
    let logits = [1.0 - f32::EPSILON, 1.0];
    let params = Params { temperature: 100.0, top_k: 1, ..PLAIN };
    assert_eq!(kept(&logits, params), [argmax(&logits).unwrap()]);
}

#[test]
fn banned_tokens_are_never_chosen() {
    let logits = [1.0, 9.0, 2.0];
    let mut greedy = Sampler::new(Params::GREEDY, vec![1, 99]).unwrap();
    assert_eq!(greedy.sample(&logits, 0).unwrap(), 2);
    // The rest is renormalized: 1 : e instead of 1 : e⁸ : e.
    let mut drawn = Sampler::new(PLAIN, vec![1, 99]).unwrap();
    let e = std::f64::consts::E;
    let chi = chi_square(&mut drawn, &logits, &[1.0 / (1.0 + e), 0.0, e / (1.0 + e)], 20_000);
    assert!(chi < 10.83, "chi-square {chi} with 1 degree of freedom exceeds p = 0.001");
    // Banned tokens use up no place of the k best.
    let mut best = Sampler::new(Params { top_k: 1, ..PLAIN }, vec![1]).unwrap();
    assert_eq!(best.sample(&logits, 0).unwrap(), 2);
    for params in [Params::GREEDY, PLAIN] {
        let mut none_left = Sampler::new(params, vec![0, 1]).unwrap();
        assert!(none_left.sample(&[1.0, 2.0], 0).is_err());
    }
}

/// Probabilities are written down, not computed by the code under test. The limits are those of
/// chi-square at p = 0.001.
#[test]
fn draws_follow_the_restricted_distribution() {
    let logits = logs(&[0.1, 0.2, 0.5, 0.2]);
    let all = Params { seed: 7, ..PLAIN };
    for (name, params, expected, limit) in [
        ("softmax", all, [0.1, 0.2, 0.5, 0.2], 16.27),
        // Squares of the probabilities over their sum, 0.34.
        (
            "temperature 0.5",
            Params { temperature: 0.5, ..all },
            [1.0 / 34.0, 4.0 / 34.0, 25.0 / 34.0, 4.0 / 34.0],
            16.27,
        ),
        ("top-k 2", Params { top_k: 2, ..all }, [0.0, 2.0 / 7.0, 5.0 / 7.0, 0.0], 10.83),
        (
            "top-p 0.85",
            Params { top_p: 0.85, ..all },
            [0.0, 2.0 / 9.0, 5.0 / 9.0, 2.0 / 9.0],
            13.82,
        ),
        ("min-p 0.3", Params { min_p: 0.3, ..all }, [0.0, 2.0 / 9.0, 5.0 / 9.0, 2.0 / 9.0], 13.82),
    ] {
        let chi = chi_square(&mut sampler(params), &logits, &expected, 40_000);
        assert!(chi < limit, "{name}: chi-square {chi} exceeds {limit}");
    }
}

/// A cut that is reached exactly takes no more; one above it does.
#[test]
fn top_p_keeps_the_shortest_prefix_that_reaches_it() {
    let logits = logs(&[0.1, 0.2, 0.5, 0.2]);
    assert_eq!(kept(&logits, Params { top_p: 1e-9, ..PLAIN }), [2]);
    assert_eq!(kept(&logits, Params { top_p: 0.49, ..PLAIN }), [2]);
    assert_eq!(kept(&logits, Params { top_p: 0.6, ..PLAIN }), [1, 2]);
    assert_eq!(kept(&logits, Params { top_p: 0.8, ..PLAIN }), [1, 2, 3]);
    assert_eq!(kept(&logits, Params { top_p: 0.95, ..PLAIN }), [0, 1, 2, 3]);
    // Weights are exactly 1 here, so that 0.6 of ten is exactly six.
    let ten = [0.0; 10];
    assert_eq!(kept(&ten, Params { top_p: 0.6, ..PLAIN }), [0, 1, 2, 3, 4, 5]);
    assert_eq!(kept(&ten, Params { top_p: 0.601, ..PLAIN }), [0, 1, 2, 3, 4, 5, 6]);
}

#[test]
fn restrictions_apply_in_the_order_that_is_promised() {
    // Of 0.4 + 0.3, the first token alone has 4/7: top-p looks at what top-k left.
    let logits = logs(&[0.4, 0.3, 0.2, 0.1]);
    assert_eq!(kept(&logits, Params { top_p: 0.5, ..PLAIN }), [0, 1]);
    assert_eq!(kept(&logits, Params { top_k: 2, top_p: 0.5, ..PLAIN }), [0]);
    // Min-p would leave 0.4 + 0.3 too; top-p does not look at what it leaves.
    let logits = logs(&[0.4, 0.3, 0.15, 0.15]);
    assert_eq!(kept(&logits, Params { min_p: 0.5, ..PLAIN }), [0, 1]);
    assert_eq!(kept(&logits, Params { min_p: 0.5, top_p: 0.5, ..PLAIN }), [0, 1]);
    assert_eq!(kept(&logits, Params { min_p: 1.0, ..PLAIN }), [0]);
}

/// SplitMix64's first output for the state 0 is 0xE220A8397B1DCDAF; the others were computed from
/// its definition in another language.
#[test]
fn draws_are_the_documented_function_of_seed_and_position() {
    let scale = (1u64 << 53) as f64;
    assert_eq!(uniform(0, 0), 5_876_733_520_225_071.0 / scale);
    assert_eq!(uniform(42, 7), 3_893_855_010_940_113.0 / scale);
    assert_eq!(uniform(u64::MAX, 1 << 40), 739_944_736_901_468.0 / scale);
}

#[test]
fn a_draw_depends_on_seed_and_position_only() {
    let logits: Vec<f32> = (0..50).map(|i| (i % 7) as f32 * 0.3).collect();
    let draws = |seed| {
        let mut sampler = sampler(Params { seed, ..PLAIN });
        let backwards: Vec<u32> =
            (0..64).rev().map(|i| sampler.sample(&logits, i).unwrap()).collect();
        let mut forwards: Vec<u32> = (0..64).map(|i| sampler.sample(&logits, i).unwrap()).collect();
        forwards.reverse();
        assert_eq!(backwards, forwards);
        forwards
    };
    assert_eq!(draws(1), draws(1));
    assert_ne!(draws(1), draws(2));
}

/// The naive twin sorts everything and uses the system's exp in f64. A draw may differ from it
/// only where the target is within rounding of a token's edge.
#[test]
fn a_real_vocabulary_draws_as_a_full_sort_in_double_precision() {
    let vocab = 154_880;
    for (name, spread) in [("flat", 0.5), ("wide", 25.0), ("peaked", 90.0)] {
        let logits: Vec<f32> =
            (0..vocab).map(|i| ((uniform(5, i) + uniform(6, i) - 1.0) * spread) as f32).collect();
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
        let max = logits[order[0]] as f64;
        let weights: Vec<f64> = order.iter().map(|i| (logits[*i] as f64 - max).exp()).collect();
        for top_p in [1.0, 0.95, 0.3] {
            let total: f64 = weights.iter().sum();
            let mut edges = vec![0.0];
            for weight in &weights {
                let reached = edges[edges.len() - 1];
                if reached >= top_p * total {
                    break;
                }
                edges.push(reached + weight);
            }
            let mass = edges[edges.len() - 1];
            let mut sampler = sampler(Params { top_p, seed: 11, ..PLAIN });
            for position in 0..20 {
                let token = sampler.sample(&logits, position).unwrap();
                let rank = order.iter().position(|i| *i == token as usize).unwrap();
                let target = uniform(11, position as u64) * mass;
                let slack = 1e-6 * mass;
                assert!(rank + 1 < edges.len(), "{name} {top_p} {position}: rank {rank} was cut");
                assert!(
                    edges[rank] - slack <= target && target <= edges[rank + 1] + slack,
                    "{name} {top_p} {position}: rank {rank}"
                );
            }
        }
    }
}

#[test]
fn parameters_out_of_range_are_named() {
    for (params, name) in [
        (Params { temperature: -1.0, ..PLAIN }, "temperature"),
        (Params { temperature: 100.5, ..PLAIN }, "temperature"),
        (Params { temperature: f64::NAN, ..PLAIN }, "temperature"),
        (Params { top_p: 0.0, ..PLAIN }, "top_p"),
        (Params { top_p: 1.1, ..PLAIN }, "top_p"),
        (Params { top_p: f64::NAN, ..PLAIN }, "top_p"),
        (Params { min_p: 2.0, ..PLAIN }, "min_p"),
        (Params { min_p: f64::NAN, ..PLAIN }, "min_p"),
    ] {
        let error = Sampler::new(params, Vec::new()).err().unwrap().to_string();
        assert!(error.starts_with(name) && error.contains("expected"), "{error}");
    }
}

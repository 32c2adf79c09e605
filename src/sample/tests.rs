//! Sampling against probabilities written down by hand, and against a naive twin.

#![forbid(unsafe_code)]

use super::*;

const PLAIN: Params = {
    let mut params = Params::GREEDY;
    params.temperature = 1.0;
    params
};

/// Draws of a chi-square test.
const DRAWS: usize = 200_000;

/// Chi-square at p = 0.001 with this many degrees of freedom, from 1.
const CHI_SQUARE_MAX: [f64; 3] = [10.83, 13.82, 16.27];

fn sampler(params: Params, vocab_size: usize) -> Sampler {
    Sampler::new(params, vocab_size, Vec::new()).unwrap()
}

/// A draw at the end of a timeline of zeros, which parameters without penalties do not look at.
fn draw(sampler: &mut Sampler, logits: &[f32], position: usize) -> Result<u32> {
    static TIMELINE: [u32; DRAWS] = [0; DRAWS];
    sampler.sample(logits, &TIMELINE[..position], None)
}

/// Logits whose softmax is `probabilities`.
fn logs(probabilities: &[f32]) -> Vec<f32> {
    probabilities.iter().map(|p| p.ln()).collect()
}

/// The tokens that 3,000 draws meet, ascending.
fn kept(logits: &[f32], params: Params) -> Vec<u32> {
    let mut sampler = sampler(params, logits.len());
    let mut seen: Vec<u32> = (0..3000).map(|i| draw(&mut sampler, logits, i).unwrap()).collect();
    seen.sort_unstable();
    seen.dedup();
    seen
}

/// Fails if chi-square of the draws against the expected probabilities exceeds what chance allows.
fn assert_follows(case: &str, expected: &[f64], mut draw: impl FnMut(usize) -> u32) {
    let mut counts = vec![0.0; expected.len()];
    (0..DRAWS).for_each(|i| counts[draw(i) as usize] += 1.0);
    let (mut chi, mut kept) = (0.0, 0);
    for (token, (count, p)) in counts.iter().zip(expected).enumerate() {
        assert!(*p > 0.0 || *count == 0.0, "{case}: token {token} was cut and came up");
        if *p > 0.0 {
            chi += (count - p * DRAWS as f64).powi(2) / (p * DRAWS as f64);
            kept += 1;
        }
    }
    assert!(chi < CHI_SQUARE_MAX[kept - 2], "{case}: chi-square {chi} of {kept} tokens");
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
            let error = draw(&mut sampler(params, 3), &logits, 0).unwrap_err().to_string();
            assert!(error.contains(&format!("logit of token {token} is")), "{error}");
        }
        assert!(argmax(&logits).is_err());
        assert!(log_probabilities(&logits, 0, 1, &mut Vec::new()).is_err());
    }
    assert!(argmax(&[]).is_err());
    assert!(draw(&mut sampler(PLAIN, 0), &[], 0).is_err());
    let error = draw(&mut sampler(PLAIN, 3), &[0.0; 4], 0).unwrap_err().to_string();
    assert_eq!(error, "expected logits of 3 tokens, found 4");
}

#[test]
fn ties_choose_the_lowest_id() {
    assert_eq!(argmax(&[1.0, 3.0, 3.0, 2.0]).unwrap(), 1);
    assert_eq!(argmax(&[-0.0, 0.0]).unwrap(), 0);
    let one = Params { top_k: 1, ..PLAIN };
    assert_eq!(kept(&[1.0, 3.0, 3.0], one.clone()), [1]);
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
fn banned_tokens_are_never_chosen_whatever_their_bias() {
    let logits = [1.0, 9.0, 2.0];
    let sampler = |params, banned| Sampler::new(params, 3, banned).unwrap();
    let mut greedy = sampler(Params::GREEDY, vec![1, 99]);
    assert_eq!(draw(&mut greedy, &logits, 0).unwrap(), 2);
    // The rest is renormalized: 1 : e instead of 1 : e⁸ : e.
    let mut drawn = sampler(Params { logit_bias: vec![(1, 100.0)], ..PLAIN }, vec![1, 99]);
    let e = std::f64::consts::E;
    let expected = [1.0 / (1.0 + e), 0.0, e / (1.0 + e)];
    assert_follows("banned", &expected, |i| draw(&mut drawn, &logits, i).unwrap());
    // Banned tokens use up no place of the k best.
    let mut best = sampler(Params { top_k: 1, ..PLAIN }, vec![1]);
    assert_eq!(draw(&mut best, &logits, 0).unwrap(), 2);
    for params in [Params::GREEDY, PLAIN] {
        assert!(draw(&mut sampler(params, vec![0, 1, 2]), &logits, 0).is_err());
    }
}

/// Token 64 is bit 0 of the second word.
#[test]
fn only_allowed_tokens_are_chosen() {
    let mut logits = [0.0; 70];
    (logits[3], logits[64], logits[69]) = (9.0, 1.0, 2.0);
    let mut greedy = Sampler::new(Params::GREEDY, 70, vec![69]).unwrap();
    let mut choose = |allowed: &[u64]| greedy.sample(&logits, &[], Some(allowed)).ok();
    assert_eq!(choose(&[!0, !0, !0]), Some(3));
    assert_eq!(choose(&[!(1 << 3), !0]), Some(64));
    assert_eq!(choose(&[1 << 5, 1]), Some(64));
    assert_eq!(choose(&[1 << 5, 1 << 5]), Some(5), "a banned token was allowed back");
    // Words that are missing allow none.
    assert_eq!(choose(&[1 << 5]), Some(5));
    assert_eq!([choose(&[]), choose(&[0, 1 << 5])], [None, None]);
}

/// Probabilities are written down, not computed by the code under test.
#[test]
fn draws_follow_the_restricted_distribution() {
    let logits = logs(&[0.1, 0.2, 0.5, 0.2]);
    let all = Params { seed: 7, ..PLAIN };
    // Squares of the probabilities over their sum, 0.34.
    let squares = [1.0 / 34.0, 4.0 / 34.0, 25.0 / 34.0, 4.0 / 34.0];
    let without_the_first = [0.0, 2.0 / 9.0, 5.0 / 9.0, 2.0 / 9.0];
    for (case, params, expected) in [
        ("softmax", all.clone(), [0.1, 0.2, 0.5, 0.2]),
        ("temperature 0.5", Params { temperature: 0.5, ..all.clone() }, squares),
        ("top-k 2", Params { top_k: 2, ..all.clone() }, [0.0, 2.0 / 7.0, 5.0 / 7.0, 0.0]),
        ("top-p 0.85", Params { top_p: 0.85, ..all.clone() }, without_the_first),
        ("min-p 0.3", Params { min_p: 0.3, ..all }, without_the_first),
    ] {
        let mut sampler = sampler(params, 4);
        assert_follows(case, &expected, |i| draw(&mut sampler, &logits, i).unwrap());
    }
}

/// One timeline, 2 tokens of prompt and 4 of reply, with another seed for each draw. Logits are
/// logarithms, so that penalties divide weights by whole numbers.
#[test]
fn draws_follow_the_penalized_distribution() {
    let (ln2, ln3) = (2.0f64.ln(), 3.0f64.ln());
    let timeline = [1, 1, 0, 2, 2, 2];
    let weights = |weights: [f64; 4]| weights.map(|w| w / weights.iter().sum::<f64>());
    for (case, params, of, expected) in [
        // √4, √9, 0.5² for the logit below 0; token 3 is not there.
        (
            "repetition",
            Params { repetition_penalty: 2.0, ..PLAIN },
            [4.0, 9.0, 0.5, 1.0],
            [2.0, 3.0, 0.25, 1.0],
        ),
        ("presence", Params { presence_penalty: ln2, ..PLAIN }, [1.0; 4], [0.5, 1.0, 0.5, 1.0]),
        ("frequency", Params { frequency_penalty: ln2, ..PLAIN }, [1.0; 4], [0.5, 1.0, 0.125, 1.0]),
        (
            "frequency below 0",
            Params { frequency_penalty: -ln2, ..PLAIN },
            [1.0; 4],
            [2.0, 1.0, 8.0, 1.0],
        ),
        (
            "bias",
            Params { logit_bias: vec![(0, ln3), (3, -ln2), (0, ln3)], ..PLAIN },
            [1.0; 4],
            [9.0, 1.0, 1.0, 0.5],
        ),
        (
            "repetition, then presence and frequency, then bias, then temperature",
            Params {
                repetition_penalty: 2.0,
                presence_penalty: ln2,
                frequency_penalty: ln2,
                logit_bias: vec![(2, ln3)],
                temperature: 0.5,
                ..PLAIN
            },
            [16.0, 9.0, 64.0, 1.0],
            // (√16 / 4)², √9², (√64 / 16 · 3)², 1
            [1.0, 9.0, 2.25, 1.0],
        ),
    ] {
        let (logits, mut sampler) = (logs(&of.map(|weight| weight as f32)), sampler(params, 4));
        sampler.start_reply(2);
        assert_follows(case, &weights(expected), |i| {
            sampler.params.seed = i as u64;
            sampler.sample(&logits, &timeline, None).unwrap()
        });
    }
}

/// The values are those of numpy: logits ((i · 7919) mod 1000) / 100 − 5 in f32, a timeline of 60
/// tokens k² mod 37, the last 40 of them reply.
#[test]
fn penalties_are_those_of_another_implementation() {
    let logits: Vec<f32> =
        (0..1000).map(|i| ((i * 7919 % 1000) as f64 / 100.0 - 5.0) as f32).collect();
    let timeline: Vec<u32> = (0..60).map(|k| k * k % 37).collect();
    let params = Params {
        repetition_penalty: 1.3,
        presence_penalty: 0.4,
        frequency_penalty: 0.25,
        logit_bias: vec![(5, 2.5), (36, -1.5)],
        ..Params::GREEDY
    };
    let mut sampler = sampler(params, 1000);
    sampler.start_reply(20);
    sampler.sample(&logits, &timeline, None).unwrap();
    for (token, want) in [
        (0, -7.15),
        (1, 2.3230769670926605),
        (4, 0.4538461465101974),
        (5, 3.449999988079071),
        (9, -3.8769999504089356),
        (16, 0.669230739886944),
        (25, 2.753846153846154),
        (36, -7.807999801635742),
    ] {
        let got = sampler.logits[token];
        assert!((got as f64 - want).abs() < 1e-6, "token {token}: {got} against {want}");
    }
    let changed = sampler.logits.iter().zip(&logits).filter(|(a, b)| a != b).count();
    assert_eq!(changed, 20, "19 tokens of the timeline and one with a bias");
}

/// Drafted positions are asked about in a row, and again when a draft fails.
#[test]
fn penalties_depend_on_the_timeline_and_not_on_earlier_calls() {
    let logits: Vec<f32> = (0..40).map(|i| (i % 5) as f32 * 0.4).collect();
    let timeline: Vec<u32> = (0..64).map(|i| i * i % 40).collect();
    let params =
        Params { repetition_penalty: 1.2, presence_penalty: 0.5, frequency_penalty: 0.5, ..PLAIN };
    let new = || {
        let mut sampler = sampler(params.clone(), 40);
        sampler.start_reply(4);
        sampler
    };
    let mut used = new();
    for length in [8, 9, 10, 11, 9, 10, 64, 3, 8] {
        let want = new().sample(&logits, &timeline[..length], None).unwrap();
        assert_eq!(used.sample(&logits, &timeline[..length], None).unwrap(), want, "{length}");
    }
}

/// The largest logits with the strongest parameters stay finite, so that a choice is left.
#[test]
fn penalties_and_biases_overflow_to_the_largest_logit_and_not_to_infinity() {
    let params = Params { repetition_penalty: 0.01, logit_bias: vec![(0, 100.0)], ..PLAIN };
    for params in [params.clone(), Params { temperature: 0.0, ..params }] {
        let mut sampler = sampler(params, 2);
        assert_eq!(sampler.sample(&[f32::MAX, f32::MIN], &[0, 1], None).unwrap(), 0);
        assert!(sampler.logits.iter().all(|logit| logit.is_finite()));
    }
    // A timeline may have tokens from elsewhere; they have no logit to change.
    assert_eq!(
        sampler(Params { presence_penalty: 1.0, repetition_penalty: 2.0, ..Params::GREEDY }, 2)
            .sample(&[0.0, 1.0], &[7, u32::MAX], None)
            .unwrap(),
        1
    );
}

#[test]
fn log_probabilities_are_those_of_the_model_and_the_best_come_first() {
    let mut top = Vec::new();
    let logits = logs(&[0.1, 0.2, 0.5, 0.2]);
    let near = |got: f64, want: f64| assert!((got - want).abs() < 1e-6, "{got} against {want}");
    near(log_probabilities(&logits, 0, 3, &mut top).unwrap(), 0.1f64.ln());
    assert_eq!(top.iter().map(|(token, _)| *token).collect::<Vec<_>>(), [2, 1, 3]);
    near(top[0].1, 0.5f64.ln());
    near(top[2].1, 0.2f64.ln());
    // No more than there are, and none left from the call before.
    log_probabilities(&logits, 0, 20, &mut top).unwrap();
    assert_eq!(top.len(), 4);
    log_probabilities(&logits, 0, 0, &mut top).unwrap();
    assert!(top.is_empty());
    // A token far below the others still has its own value: ln 1/(1 + e⁻³⁰⁰) = 0.
    near(log_probabilities(&[0.0, -300.0], 1, 2, &mut top).unwrap(), -300.0);
    near(top[1].1, -300.0);
    let error = log_probabilities(&logits, 4, 0, &mut top).unwrap_err().to_string();
    assert_eq!(error, "expected a token id below 4, found 4");
    // From numpy: the logits of the test of penalties.
    let logits: Vec<f32> =
        (0..1000).map(|i| ((i * 7919 % 1000) as f64 / 100.0 - 5.0) as f32).collect();
    near(log_probabilities(&logits, 123, 3, &mut top).unwrap(), -14.23012073);
    assert_eq!(top.iter().map(|(token, _)| *token).collect::<Vec<_>>(), [321, 642, 963]);
    near(top[2].1, -4.630120825846368);
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
        let mut sampler = sampler(Params { seed, ..PLAIN }, 50);
        let mut draw = |i| draw(&mut sampler, &logits, i).unwrap();
        let backwards: Vec<u32> = (0..64).rev().map(&mut draw).collect();
        let mut forwards: Vec<u32> = (0..64).map(&mut draw).collect();
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
            let mut sampler = sampler(Params { top_p, seed: 11, ..PLAIN }, logits.len());
            for position in 0..20 {
                let token = draw(&mut sampler, &logits, position).unwrap();
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
        (Params { repetition_penalty: 0.0, ..PLAIN }, "repetition_penalty"),
        (Params { repetition_penalty: 101.0, ..PLAIN }, "repetition_penalty"),
        (Params { presence_penalty: -2.1, ..PLAIN }, "presence_penalty"),
        (Params { frequency_penalty: f64::NAN, ..PLAIN }, "frequency_penalty"),
        (Params { logit_bias: vec![(0, 1.0), (1, 100.5)], ..PLAIN }, "logit_bias"),
        (Params { logit_bias: vec![(0, f64::NAN)], ..PLAIN }, "logit_bias"),
        (Params { logit_bias: vec![(10, 1.0)], ..PLAIN }, "logit_bias"),
    ] {
        let error = Sampler::new(params, 10, Vec::new()).err().unwrap().to_string();
        assert!(error.starts_with(name) && error.contains("expected"), "{error}");
    }
}

/// Tokens in the order of their chances: the first is drawn below 0.5 and guessed below 0.4, the
/// second from there to 0.8 and to 0.75. Both are the same below 0.4, from 0.5 to 0.75 and above
/// 0.8.
#[test]
fn a_guess_is_drawn_with_the_number_of_the_token_it_guesses() {
    let (model, head) = (logs(&[0.5, 0.3, 0.2]), logs(&[0.4, 0.35, 0.25]));
    let mut sampler = sampler(PLAIN, 3);
    let timeline = [0; DRAWS];
    let mut is_right = |position: usize| {
        let tokens = &timeline[..position];
        sampler.guess(&head, tokens).unwrap() == sampler.choose(&model, tokens).unwrap()
    };
    let right = (0..DRAWS).filter(|position| is_right(*position)).count();
    let share = right as f64 / DRAWS as f64;
    assert!((share - 0.85).abs() < 0.004, "{share}");
}

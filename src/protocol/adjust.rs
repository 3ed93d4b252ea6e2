//! `presence_penalty`, `frequency_penalty` and `logit_bias` as OpenAI's clients write them.

use std::ops::RangeInclusive;
use std::sync::Arc;

use serde_json::Value;

use super::body::{Body, wrong_type};
use super::errors::{ApiError, Code};
use crate::arith::MAX_BIAS;
use crate::arith::adjust::adjust;
use crate::backend::Adjust;

/// `presence_penalty` and `frequency_penalty`.
pub const PENALTY: RangeInclusive<f64> = -2.0..=2.0;
/// A value of `logit_bias`.
pub const BIAS: RangeInclusive<f64> = -100.0..=100.0;

/// Reads the three fields; `None` when nothing of them has an effect. Whether ids exist is checked with the rest of the request.
///
/// # Errors
/// A value outside its range, too many biases, or a key that is no token id.
pub fn parse(body: &mut Body) -> Result<Option<Arc<Adjust>>, ApiError> {
    let presence = body.number("presence_penalty", PENALTY)?.unwrap_or(0.0);
    let frequency = body.number("frequency_penalty", PENALTY)?.unwrap_or(0.0);
    let bias = match body.value("logit_bias") {
        None => Vec::new(),
        Some(Value::Object(fields)) if fields.len() > MAX_BIAS => {
            let text = format!("logit_bias has {} entries, at most {MAX_BIAS} are allowed", fields.len());
            return Err(ApiError::about(Code::InvalidValue, "logit_bias", text));
        }
        Some(Value::Object(fields)) => fields.iter().map(entry).collect::<Result<_, _>>()?,
        Some(other) => return Err(wrong_type("logit_bias", "an object from token ids to numbers", &other)),
    };
    Ok(adjust(presence, frequency, bias).map(Arc::new))
}

fn entry((key, value): (&String, &Value)) -> Result<(u32, f64), ApiError> {
    let bad = |text: String| ApiError::about(Code::InvalidValue, "logit_bias", text);
    // One spelling an id, so that no id can stand there twice.
    let id = key.parse::<u32>().ok().filter(|id| id.to_string() == *key);
    let id = id.ok_or_else(|| bad("the keys of logit_bias must be token ids in decimal, such as \"50256\"".into()))?;
    let bias = value.as_f64().ok_or_else(|| bad(format!("logit_bias of {id} must be a number")))?;
    if !BIAS.contains(&bias) {
        return Err(bad(format!("logit_bias of {id} is {value}, it must lie in {}..={}", BIAS.start(), BIAS.end())));
    }
    Ok((id, bias))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(fields: Value) -> Result<Option<Arc<Adjust>>, ApiError> {
        parse(&mut Body::parse(fields.to_string().as_bytes()).expect("an object"))
    }

    #[test]
    fn values_without_an_effect_are_no_adjustment() {
        let none = [json!({}), json!({"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {"7": 0}})];
        for fields in none {
            assert_eq!(read(fields).expect("valid"), None);
        }
    }

    #[test]
    fn what_is_given_is_rounded_once_and_sorted_by_id() {
        let read =
            read(json!({"presence_penalty": 0.1, "frequency_penalty": -2, "logit_bias": {"70": -100, "9": 0.3}}));
        let expected = Adjust { presence: 0.1, frequency: -2.0, bias: vec![(9, 0.3), (70, -100.0)] };
        assert_eq!(read.expect("valid").as_deref(), Some(&expected));
    }

    #[test]
    fn an_error_names_its_field() {
        let cases = [
            (json!({"presence_penalty": 2.1}), "presence_penalty"),
            (json!({"presence_penalty": "1"}), "presence_penalty"),
            (json!({"frequency_penalty": -2.01}), "frequency_penalty"),
            (json!({"logit_bias": [1]}), "logit_bias"),
            (json!({"logit_bias": {"a": 1}}), "logit_bias"),
            (json!({"logit_bias": {"-1": 1}}), "logit_bias"),
            (json!({"logit_bias": {"07": 1}}), "logit_bias"),
            (json!({"logit_bias": {"7": 100.5}}), "logit_bias"),
            (json!({"logit_bias": {"7": null}}), "logit_bias"),
            (json!({"logit_bias": {"4294967296": 1}}), "logit_bias"),
        ];
        for (fields, name) in cases {
            let error = read(fields.clone()).expect_err("refused");
            assert_eq!((error.code, error.param.as_deref()), (Code::InvalidValue, Some(name)), "{fields}");
        }
    }
}

//! /v1/models in Anthropic's shape: the one model that is served, as a page of a list.

use serde_json::{Value, json};

use crate::protocol::errors::{ApiError, Code};

/// What there is to say about the model.
#[derive(Clone, Copy, Debug)]
pub struct Model<'a> {
    /// Its configured id.
    pub id: &'a str,
    /// Unix time since which it is served, seconds.
    pub created: u64,
    /// Longest prompt, tokens.
    pub max_input_tokens: usize,
    /// Longest answer, tokens.
    pub max_tokens: usize,
}

/// One model.
pub fn model(model: Model<'_>) -> Value {
    json!({
        "type": "model",
        "id": model.id,
        "display_name": model.id,
        "created_at": rfc3339(model.created),
        "lifecycle": "active",
        "deprecated_at": null,
        "retires_at": null,
        "line": null,
        "max_input_tokens": model.max_input_tokens,
        "max_tokens": model.max_tokens,
        "capabilities": null,
    })
}

/// What a client asks of the list, by the query of its request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Page {
    /// A cursor: one names the only model, so nothing is before or after it.
    cursor: Option<(&'static str, String)>,
    /// Lifecycles asked for; empty asks for the usual ones.
    lifecycles: Vec<String>,
}

impl Page {
    /// Reads a query, decoded, in its order.
    ///
    /// # Errors
    /// An unknown parameter, or a value that it does not have.
    pub fn read(query: Vec<(String, String)>) -> Result<Self, ApiError> {
        let mut page = Self::default();
        for (name, value) in query {
            let bad = |text: String| Err(ApiError::about(Code::InvalidValue, name.clone(), text));
            match name.as_str() {
                "limit" if !value.parse().is_ok_and(|n: u32| (1..=1000).contains(&n)) => {
                    return bad("limit must be an integer in 1..=1000".to_owned());
                }
                "limit" | "beta" => {}
                "after_id" | "before_id" if page.cursor.is_some() => {
                    return bad("after_id and before_id exclude each other".to_owned());
                }
                "after_id" => page.cursor = Some(("after_id", value)),
                "before_id" => page.cursor = Some(("before_id", value)),
                "lifecycle" | "lifecycle[]" if matches!(value.as_str(), "active" | "deprecated" | "retired") => {
                    page.lifecycles.push(value);
                }
                "lifecycle" | "lifecycle[]" => return bad(format!("{name} must be active, deprecated or retired")),
                _ => {
                    let text = format!("unknown parameter {name}");
                    return Err(ApiError::about(Code::UnknownParameter, name, text));
                }
            }
        }
        Ok(page)
    }

    /// The page of the list that has `only` this model.
    ///
    /// # Errors
    /// A cursor that names no model.
    pub fn list(&self, only: Model<'_>) -> Result<Value, ApiError> {
        if let Some((name, _)) = self.cursor.as_ref().filter(|(_, id)| id != only.id) {
            let text = format!("{name} names no model; this server has `{}`", only.id);
            return Err(ApiError::about(Code::InvalidValue, *name, text));
        }
        let active = self.lifecycles.is_empty() || self.lifecycles.iter().any(|l| l == "active");
        let data: Vec<Value> = (self.cursor.is_none() && active).then(|| model(only)).into_iter().collect();
        let id = data.first().map(|_| only.id);
        Ok(json!({"data": data, "has_more": false, "first_id": id, "last_id": id}))
    }
}

/// A moment in UTC, from Unix seconds. The date is Hinnant's `civil_from_days`: years begin in March, so that the leap day is the last.
fn rfc3339(seconds: u64) -> String {
    let (days, second) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = 400 * era + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3_600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_become_dates_across_leap_days_and_centuries() {
        for (seconds, date) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (951_868_800, "2000-03-01T00:00:00Z"),
            (1_735_689_599, "2024-12-31T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(rfc3339(seconds), date);
        }
    }

    #[test]
    fn nothing_is_before_or_after_the_only_model() {
        let only = Model { id: "m", created: 0, max_input_tokens: 1, max_tokens: 1 };
        let page = |query: &[(&str, &str)]| {
            Page::read(query.iter().map(|&(n, v)| (n.to_owned(), v.to_owned())).collect()).and_then(|p| p.list(only))
        };
        assert_eq!(page(&[]).expect("a page")["data"].as_array().map(Vec::len), Some(1));
        assert_eq!(page(&[("after_id", "m")]).expect("a page")["data"], json!([]));
        assert_eq!(page(&[("lifecycle[]", "retired")]).expect("a page")["data"], json!([]));
        assert!(page(&[("after_id", "x")]).is_err());
        assert!(page(&[("limit", "0")]).is_err());
        assert!(page(&[("lmit", "1")]).is_err());
    }
}

//! Reads a request body field by field. Every field is asked for by name and type; whatever nobody asked for is refused by name,
//! so nothing a client sends is ignored silently. `null` is the same as absent.

use std::fmt;
use std::ops::RangeInclusive;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use super::errors::{ApiError, Code, beginning};

/// Characters of a stop string at most.
pub const MAX_STOP_CHARS: usize = 1_024;

/// Fields of a dialect that are not served, each with the values that have no effect and therefore pass.
pub type Unserved = Vec<(&'static str, Vec<Value>)>;

/// A JSON object that is being read.
#[derive(Debug)]
pub struct Body {
    fields: Map<String, Value>,
    /// Where this object stands in the request, for messages: "" or "messages[0].".
    prefix: String,
}

impl Body {
    /// Parses the bytes of a request.
    ///
    /// # Errors
    /// No JSON, no object, or a field that stands there twice.
    pub fn parse(bytes: &[u8]) -> Result<Self, ApiError> {
        if bytes.is_empty() {
            return Err(ApiError::new(Code::InvalidJson, "the request has no body; send a JSON object"));
        }
        let UniqueFields(fields) = serde_json::from_slice(bytes)
            .map_err(|e| ApiError::new(Code::InvalidJson, format!("the body is not a valid JSON object: {e}")))?;
        Ok(Self { fields, prefix: String::new() })
    }

    /// Reads an object inside the request.
    ///
    /// # Errors
    /// It is no object.
    pub fn nested(value: Value, path: &str) -> Result<Self, ApiError> {
        match value {
            Value::Object(fields) => Ok(Self { fields, prefix: format!("{path}.") }),
            other => Err(wrong_type(path, "an object", &other)),
        }
    }

    /// The full name of a field.
    pub fn path(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// A field as it is, left in place.
    pub fn peek(&self, name: &str) -> Option<&Value> {
        self.fields.get(name)
    }

    /// Takes a field as it is.
    pub fn value(&mut self, name: &str) -> Option<Value> {
        self.fields.remove(name).filter(|v| !v.is_null())
    }

    /// A string.
    ///
    /// # Errors
    /// Another type.
    pub fn string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.value(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong_type(&self.path(name), "a string", &other)),
        }
    }

    /// A boolean.
    ///
    /// # Errors
    /// Another type.
    pub fn boolean(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        match self.value(name) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(value)),
            Some(other) => Err(wrong_type(&self.path(name), "a boolean", &other)),
        }
    }

    /// An integer within `range`; 3.0 is none.
    ///
    /// # Errors
    /// Another type or a value outside.
    pub fn integer(&mut self, name: &str, range: RangeInclusive<u64>) -> Result<Option<u64>, ApiError> {
        let Some(value) = self.value(name) else { return Ok(None) };
        let path = self.path(name);
        if !value.is_i64() && !value.is_u64() {
            return Err(wrong_type(&path, "an integer", &value));
        }
        match value.as_u64().filter(|v| range.contains(v)) {
            Some(value) => Ok(Some(value)),
            None => Err(outside(&path, &value, range.start(), range.end())),
        }
    }

    /// A number within `range`.
    ///
    /// # Errors
    /// Another type or a value outside.
    pub fn number(&mut self, name: &str, range: RangeInclusive<f64>) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.value(name) else { return Ok(None) };
        let path = self.path(name);
        let Some(number) = value.as_f64() else { return Err(wrong_type(&path, "a number", &value)) };
        if range.contains(&number) {
            return Ok(Some(number));
        }
        Err(outside(&path, &value, range.start(), range.end()))
    }

    /// An array of token ids.
    ///
    /// # Errors
    /// Another type, or an element that is no id.
    pub fn token_ids(&mut self, name: &str) -> Result<Option<Vec<u32>>, ApiError> {
        let Some(value) = self.value(name) else { return Ok(None) };
        token_ids(&self.path(name), value).map(Some)
    }

    /// A string or an array of at most `most` strings of 1 to `MAX_STOP_CHARS` characters.
    ///
    /// # Errors
    /// Another type, too many, an empty string or one that is too long.
    pub fn stop_strings(&mut self, name: &str, most: usize) -> Result<Vec<String>, ApiError> {
        let path = self.path(name);
        let stops = match self.value(name) {
            None => return Ok(Vec::new()),
            Some(Value::String(one)) => vec![one],
            Some(Value::Array(many)) => many
                .into_iter()
                .map(|v| match v {
                    Value::String(text) => Ok(text),
                    other => Err(wrong_type(&path, "a string or an array of strings", &other)),
                })
                .collect::<Result<_, _>>()?,
            Some(other) => return Err(wrong_type(&path, "a string or an array of strings", &other)),
        };
        let bad = |text: String| Err(ApiError::about(Code::InvalidValue, path.clone(), text));
        if stops.len() > most {
            return bad(format!("{path} has {} strings, at most {most} are allowed", stops.len()));
        }
        if stops.iter().any(|s| !(1..=MAX_STOP_CHARS).contains(&s.chars().count())) {
            return bad(format!("{path} must hold strings of 1 to {MAX_STOP_CHARS} characters"));
        }
        Ok(stops)
    }

    /// A field that is not served: absent and the values named here pass, anything else is refused by name.
    ///
    /// # Errors
    /// A value that would have an effect.
    pub fn unsupported(&mut self, name: &str, no_op: &[Value]) -> Result<(), ApiError> {
        match self.value(name) {
            Some(value) if !no_op.contains(&value) => {
                let path = self.path(name);
                Err(ApiError::about(Code::UnsupportedParameter, path.clone(), format!("{path} is not supported")))
            }
            _ => Ok(()),
        }
    }

    /// Every field of a table that is not served.
    ///
    /// # Errors
    /// The first that would have an effect.
    pub fn refuse(&mut self, unserved: &Unserved) -> Result<(), ApiError> {
        unserved.iter().try_for_each(|(name, no_op)| self.unsupported(name, no_op))
    }

    /// A field that must be there.
    ///
    /// # Errors
    /// It is not.
    pub fn require<T>(&self, name: &str, value: Option<T>) -> Result<T, ApiError> {
        let path = self.path(name);
        value.ok_or_else(|| ApiError::about(Code::MissingParameter, path.clone(), format!("{path} is required")))
    }

    /// Ends the reading.
    ///
    /// # Errors
    /// The first field that nobody asked for.
    pub fn finish(self) -> Result<(), ApiError> {
        match self.fields.keys().next() {
            None => Ok(()),
            Some(name) => {
                let path = self.path(&beginning(name));
                Err(ApiError::about(Code::UnknownParameter, path.clone(), format!("unknown parameter {path}")))
            }
        }
    }
}

/// An array of token ids.
///
/// # Errors
/// Another type, or an element that is no id.
pub fn token_ids(path: &str, value: Value) -> Result<Vec<u32>, ApiError> {
    let Value::Array(items) = value else { return Err(wrong_type(path, "an array of token ids", &value)) };
    let id = |(at, item): (usize, &Value)| {
        let id = item.as_u64().and_then(|id| u32::try_from(id).ok());
        id.ok_or_else(|| {
            ApiError::about(Code::InvalidValue, path, format!("{path}[{at}] is {}, not a token id", shown(item)))
        })
    };
    items.iter().enumerate().map(id).collect()
}

/// The error for a field of another type.
pub fn wrong_type(path: &str, wanted: &str, found: &Value) -> ApiError {
    ApiError::about(Code::InvalidValue, path, format!("{path} must be {wanted}, not {}", kind(found)))
}

fn outside(path: &str, found: &Value, low: impl fmt::Display, high: impl fmt::Display) -> ApiError {
    ApiError::about(Code::InvalidValue, path, format!("{path} is {found}, it must lie in {low}..={high}"))
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(n) if n.as_f64().is_some_and(|n| n.fract() == 0.0 && n.abs() >= 2f64.powi(63)) => {
            "a number beyond 64 bits"
        }
        Value::Number(n) if n.is_f64() => "a fraction",
        Value::Number(_) => "an integer",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// A value in a message, without repeating what a client sent at length.
fn shown(value: &Value) -> String {
    match value {
        Value::Number(number) => number.to_string(),
        other => kind(other).to_owned(),
    }
}

/// A JSON value in which no object, however deep, names a field twice; the usual map would keep the last of two silently.
struct Unique(Value);

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(UniqueVisitor).map(Unique)
    }
}

struct UniqueVisitor;

impl<'de> Visitor<'de> for UniqueVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Value, E> {
        Ok(text.into())
    }

    fn visit_string<E: Error>(self, text: String) -> Result<Value, E> {
        Ok(text.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(Unique(item)) = access.next_element()? {
            items.push(item);
        }
        Ok(Value::Array(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, access: A) -> Result<Value, A::Error> {
        unique_fields(access).map(Value::Object)
    }
}

fn unique_fields<'de, A: MapAccess<'de>>(mut access: A) -> Result<Map<String, Value>, A::Error> {
    let mut fields = Map::new();
    while let Some((name, Unique(value))) = access.next_entry::<String, Unique>()? {
        if fields.contains_key(&name) {
            return Err(A::Error::custom(format_args!("field {} stands there twice", beginning(&name))));
        }
        fields.insert(name, value);
    }
    Ok(fields)
}

/// The object that a body is.
struct UniqueFields(Map<String, Value>);

impl<'de> Deserialize<'de> for UniqueFields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields;
        impl<'de> Visitor<'de> for Fields {
            type Value = UniqueFields;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, access: A) -> Result<UniqueFields, A::Error> {
                unique_fields(access).map(UniqueFields)
            }
        }
        deserializer.deserialize_map(Fields)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn body(value: Value) -> Body {
        Body::parse(value.to_string().as_bytes()).expect("an object")
    }

    #[test]
    fn a_field_that_stands_there_twice_is_refused() {
        let error = Body::parse(br#"{"seed": 1, "seed": 2}"#).expect_err("twice");
        assert!(error.message.contains("field seed stands there twice"), "{error}");
        let error =
            Body::parse(br#"{"a": [{"b": {"role": "system", "role": "user"}}]}"#).expect_err("twice, deep inside");
        assert!(error.message.contains("field role stands there twice"), "{error}");
    }

    #[test]
    fn a_body_is_read_as_the_usual_parser_reads_it() {
        let text = r#"{"a": [1, -1, 18446744073709551615, -9223372036854775808, 1.5, 1e300, "x\ud83d\ude00", null, true, {}, []]}"#;
        let usual: Map<String, Value> = serde_json::from_str(text).expect("valid");
        assert_eq!(Body::parse(text.as_bytes()).expect("valid").fields, usual);
    }

    #[test]
    fn an_unknown_field_is_refused_by_name() {
        let error = body(json!({"promt": "x"})).finish().expect_err("unknown");
        assert_eq!((error.code, error.param.as_deref()), (Code::UnknownParameter, Some("promt")));
    }

    #[test]
    fn a_wrong_type_and_a_value_outside_name_the_field() {
        let error = body(json!({"n": "2"})).integer("n", 1..=4).expect_err("type");
        assert_eq!(error.message, "n must be an integer, not a string");
        let error = body(json!({"n": -2})).integer("n", 1..=4).expect_err("range");
        assert_eq!(error.message, "n is -2, it must lie in 1..=4");
        let error = body(json!({"n": 2.5})).integer("n", 1..=4).expect_err("fraction");
        assert_eq!(error.message, "n must be an integer, not a fraction");
        for huge in ["18446744073709551616", "-9223372036854775809", "1e30"] {
            let body = format!("{{\"n\": {huge}}}");
            let error = Body::parse(body.as_bytes()).expect("JSON").integer("n", 1..=4).expect_err("huge");
            assert_eq!(error.message, "n must be an integer, not a number beyond 64 bits", "{huge}");
        }
    }

    #[test]
    fn an_unsupported_field_passes_at_its_no_op_value_only() {
        let no_op = [json!(0), json!(0.0)];
        assert!(body(json!({"frequency_penalty": 0.0})).unsupported("frequency_penalty", &no_op).is_ok());
        assert!(body(json!({"frequency_penalty": null})).unsupported("frequency_penalty", &no_op).is_ok());
        let error =
            body(json!({"frequency_penalty": 0.5})).unsupported("frequency_penalty", &no_op).expect_err("effect");
        assert_eq!(error.code, Code::UnsupportedParameter);
    }

    #[test]
    fn hostile_bodies_are_errors_and_no_panics() {
        let deep = "[".repeat(100_000);
        for text in ["", "null", "[]", "3", "{", "{\"a\":}", "\u{0}", deep.as_str(), "{\"a\":1e999}"] {
            assert!(Body::parse(text.as_bytes()).is_err(), "{}", &text[..text.len().min(20)]);
        }
        assert!(Body::parse(&[0xff, 0xfe, b'{']).is_err());
    }
}

//! Text as dialects carry it inside a message: a string, or an array of parts of type `text`, which are joined as they are.

use serde_json::Value;

use super::body::{Body, wrong_type};
use super::errors::{ApiError, Code, beginning};

/// The text of `content`; `extras` reads what a part has besides its type and its text.
///
/// # Errors
/// Another shape, a part that is no text, or what `extras` refuses.
pub fn text(content: Value, path: &str, extras: fn(&mut Body) -> Result<(), ApiError>) -> Result<String, ApiError> {
    let parts = match content {
        Value::String(text) => return Ok(text),
        Value::Array(parts) => parts,
        other => return Err(wrong_type(path, "a string or an array of text parts", &other)),
    };
    let part = |(at, part): (usize, Value)| {
        let mut body = Body::nested(part, &format!("{path}[{at}]"))?;
        let kind = body.string("type")?;
        let kind = body.require("type", kind)?;
        if kind != "text" {
            let path = body.path("type");
            let text = format!("{path} is {}, which is not supported; send parts of type text", beginning(&kind));
            return Err(ApiError::about(Code::UnsupportedParameter, path, text));
        }
        let text = body.string("text")?;
        let text = body.require("text", text)?;
        extras(&mut body)?;
        body.finish()?;
        Ok(text)
    };
    parts.into_iter().enumerate().map(part).collect()
}

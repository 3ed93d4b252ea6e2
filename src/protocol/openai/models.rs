//! /v1/models: the one model that is served, under its configured id.

use serde_json::{Value, json};

/// One model.
pub fn model(id: &str, created: u64) -> Value {
    json!({"id": id, "object": "model", "created": created, "owned_by": "crucible"})
}

/// All models.
pub fn list(id: &str, created: u64) -> Value {
    json!({"object": "list", "data": [model(id, created)]})
}

//! GET /openapi.json: the API as an OpenAPI 3.1 document. Written by hand over the same constants that the parsers read and the limits
//! of the model that is served; tests hold its paths to the routes and each of its bounds to the server, and a fuzzer holds its schemas
//! to the answers.

mod answers;
mod requests;

use actix_web::{HttpResponse, web};
use serde_json::{Map, Value, json};

use super::Service;
use super::respond::WHOLE_ENTRIES_MAX;

/// GET /openapi.json.
pub async fn document(service: web::Data<Service>) -> HttpResponse {
    HttpResponse::Ok().json(build(&Bounds::of(&service)))
}

/// What the model that is served and its configuration bound.
pub struct Bounds {
    /// Token ids of the vocabulary.
    vocab: usize,
    /// Most tokens of a prompt.
    prompt_tokens: usize,
    /// Most new tokens.
    new_tokens: usize,
    /// Most tokens of prompt and answer together.
    sequence: usize,
    /// Requests that may wait.
    queue: usize,
}

impl Bounds {
    fn of(service: &Service) -> Self {
        let limits = service.engine.limits();
        Self {
            vocab: limits.vocab,
            prompt_tokens: limits.longest_prompt(),
            new_tokens: limits.room(1),
            sequence: limits.longest_sequence(),
            queue: service.config.limits.max_queue,
        }
    }

    /// What no schema says.
    fn rules(&self) -> String {
        format!(
            "A language-model server whose answer is a pure function of the request. Prompt and answer together have at most {} \
             tokens, the prompt at most {} and at least one. An answer that is not streamed has at most {} entries: choices × tokens × \
             (1 + alternatives of log-probabilities). A field that is null is the same as one that is absent. An integer is \
             written without a fraction: 3, not 3.0.",
            self.sequence, self.prompt_tokens, WHOLE_ENTRIES_MAX
        )
    }
}

/// The whole document.
fn build(bounds: &Bounds) -> Value {
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Crucible",
            "version": env!("CARGO_PKG_VERSION"),
            "description": bounds.rules(),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{}, {"bearer": []}, {"header": []}],
        "paths": paths(),
        "components": {
            "schemas": schemas(bounds),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    })
}

fn schemas(bounds: &Bounds) -> Map<String, Value> {
    requests::schemas(bounds)
        .into_iter()
        .chain(answers::schemas())
        .map(|(name, schema)| (name.to_owned(), schema))
        .collect()
}

/// A reference to a schema of this document.
fn schema(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}

/// How errors of a path look, and which statuses besides 200 it has.
#[derive(Clone, Copy)]
enum Errors {
    Native,
    Openai,
    Anthropic,
    /// OpenAI's, or Anthropic's with that dialect's version header.
    Either,
}

impl Errors {
    fn schema(self) -> Value {
        let [native, openai, anthropic] = ["NativeError", "OpenaiError", "AnthropicError"].map(schema);
        match self {
            Errors::Native => native,
            Errors::Openai => openai,
            Errors::Anthropic => anthropic,
            Errors::Either => json!({"anyOf": [openai, anthropic]}),
        }
    }

    fn responses(self, statuses: &[(&str, &str)]) -> Map<String, Value> {
        let one = |(status, text): &(&str, &str)| {
            let content = json!({"application/json": {"schema": self.schema()}});
            ((*status).to_owned(), json!({"description": text, "content": content}))
        };
        statuses.iter().map(one).collect()
    }
}

const KEY: (&str, &str) = ("401", "A key is configured and none, or a wrong one, was presented.");
const BODY: [(&str, &str); 5] = [
    ("400", "Something in the request cannot be served; the error names the field."),
    KEY,
    ("408", "The body did not arrive in time."),
    ("413", "The body is over the limit."),
    ("415", "The content type is not JSON, or the body is compressed."),
];
const ENGINE: [(&str, &str); 2] =
    [("500", "The model produced a non-finite logit."), ("503", "The server drains or its engine is dead.")];
const FULL: (&str, &str) = ("429", "The waiting queue is full; retry after the time in Retry-After.");
const OVERLOADED: (&str, &str) = ("529", "The waiting queue is full.");
const MODEL: (&str, &str) = ("404", "This server does not have that model.");

/// A POST that takes JSON.
fn post(tag: &str, summary: &str, request: &str, ok: Value, errors: Errors, statuses: &[(&str, &str)]) -> Value {
    let mut responses = errors.responses(statuses);
    responses.insert("200".to_owned(), json!({"description": "The answer.", "content": ok}));
    let body = json!({"required": true, "content": {"application/json": {"schema": schema(request)}}});
    json!({"post": {"tags": [tag], "summary": summary, "requestBody": body, "responses": responses}})
}

fn get(tag: &str, summary: &str, ok: Value, errors: Errors, statuses: &[(&str, &str)]) -> Value {
    let mut responses = errors.responses(statuses);
    responses.insert("200".to_owned(), json!({"description": "The answer.", "content": ok}));
    json!({"get": {"tags": [tag], "summary": summary, "responses": responses}})
}

fn whole(name: &str) -> Value {
    json!({"application/json": {"schema": schema(name)}})
}

/// Events have no schema: of one for the whole text, tools make one for each event.
fn events() -> Value {
    json!({"text/event-stream": {}})
}

/// JSON, or events with `stream`.
fn either(name: &str) -> Value {
    json!({"application/json": {"schema": schema(name)}, "text/event-stream": {}})
}

fn paths() -> Map<String, Value> {
    let generating = [&BODY[..], &ENGINE, &[FULL]].concat();
    let openai = [&generating[..], &[MODEL]].concat();
    let anthropic = [&BODY[..], &ENGINE, &[MODEL, OVERLOADED]].concat();
    let counting = [&BODY[..], &[MODEL, ENGINE[1]]].concat();
    let texts = [&BODY[..], &[ENGINE[1]]].concat();
    let described = |summary: &str| {
        let mut path = get("status", summary, whole("Description"), Errors::Native, &[]);
        let down = json!({"description": "It is not.", "content": whole("Description")});
        path["get"]["responses"]["503"] = down;
        path["get"]["security"] = json!([{}]);
        path
    };
    let model = |summary: &str, answer: [&str; 2], statuses: &[(&str, &str)]| {
        let ok = json!({"application/json": {"schema": {"anyOf": [schema(answer[0]), schema(answer[1])]}}});
        let mut path = get("models", summary, ok, Errors::Either, statuses);
        path["get"]["parameters"] = json!([{
            "name": "anthropic-version", "in": "header", "schema": {"type": "string"},
            "description": "Asks for the answer in Anthropic's shape.",
        }]);
        path
    };
    let mut one_model = model(
        "The model that is served.",
        ["OpenaiModel", "AnthropicModel"],
        &[KEY, MODEL, ("400", "The query is malformed.")],
    );
    let id = json!({"name": "id", "in": "path", "required": true, "schema": {"type": "string", "minLength": 1}});
    if let Some(parameters) = one_model["get"]["parameters"].as_array_mut() {
        parameters.push(id);
    }
    let text = json!({"text/plain": {"schema": {"type": "string"}}});
    let object = json!({"application/json": {"schema": {"type": "object"}}});
    let all = [
        ("/v1/generate", post("native", "One answer.", "Generate", whole("Generated"), Errors::Native, &generating)),
        (
            "/v1/generate/stream",
            post("native", "The same as events token, done, error.", "Generate", events(), Errors::Native, &generating),
        ),
        (
            "/v1/chat/completions",
            post("openai", "Chat.", "ChatCompletionRequest", either("ChatCompletion"), Errors::Openai, &openai),
        ),
        (
            "/v1/completions",
            post(
                "openai",
                "Continuation of texts or token ids.",
                "CompletionRequest",
                either("Completion"),
                Errors::Openai,
                &openai,
            ),
        ),
        (
            "/v1/messages",
            post("anthropic", "Chat.", "MessagesRequest", either("Message"), Errors::Anthropic, &anthropic),
        ),
        (
            "/v1/messages/count_tokens",
            post(
                "anthropic",
                "Tokens of a prompt.",
                "CountTokensRequest",
                whole("TokenCount"),
                Errors::Anthropic,
                &counting,
            ),
        ),
        (
            "/v1/models",
            model(
                "The models that are served: one.",
                ["OpenaiModelList", "AnthropicModelList"],
                &[KEY, MODEL, ("400", "The query is malformed.")],
            ),
        ),
        ("/v1/models/{id}", one_model),
        (
            "/tokenize",
            post("tokens", "Text or messages to token ids.", "Tokenize", whole("Tokens"), Errors::Native, &texts),
        ),
        ("/detokenize", post("tokens", "Token ids to text.", "Detokenize", whole("Text"), Errors::Native, &texts)),
        ("/health", described("Whether the engine lives.")),
        ("/ready", described("Whether new work is taken.")),
        ("/metrics", get("status", "The account for Prometheus.", text, Errors::Native, &[KEY])),
        (
            "/stats",
            get("status", "The account as JSON; every value is a number.", whole("Stats"), Errors::Native, &[KEY]),
        ),
        ("/openapi.json", get("status", "This document.", object, Errors::Native, &[KEY])),
    ];
    all.into_iter().map(|(path, item)| (path.to_owned(), item)).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// (path, method) of every route, as run.rs writes them.
    fn routes() -> BTreeSet<(String, String)> {
        let source = include_str!("../run.rs");
        let mut routes = BTreeSet::new();
        for rest in source.split("resource(\"").skip(1) {
            let mut quoted = rest.split('"');
            let (path, methods) = (quoted.next().unwrap().replace(":.+}", "}"), quoted.nth(1).unwrap());
            for method in methods.split(", ").filter(|&m| m != "HEAD") {
                routes.insert((path.clone(), method.to_lowercase()));
            }
        }
        routes
    }

    #[test]
    fn the_document_has_every_route_and_no_other() {
        let mut documented = BTreeSet::new();
        for (path, item) in paths() {
            documented.extend(item.as_object().unwrap().keys().map(|method| (path.clone(), method.clone())));
        }
        assert!(documented.len() >= 15);
        assert_eq!(documented, routes());
    }

    #[test]
    fn every_reference_leads_to_a_schema_and_every_schema_is_referred_to() {
        let document = build(&Bounds { vocab: 7, prompt_tokens: 9, new_tokens: 5, sequence: 12, queue: 3 });
        let text = document.to_string();
        let used: BTreeSet<&str> =
            text.split("\"#/components/schemas/").skip(1).map(|rest| rest.split('"').next().unwrap()).collect();
        let known: BTreeSet<&str> =
            document["components"]["schemas"].as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(used, known);
    }
}

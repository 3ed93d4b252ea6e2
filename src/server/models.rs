//! GET /v1/models and /v1/models/{id}, in the shape of the client's dialect.

use actix_web::{HttpRequest, HttpResponse, web};
use serde_json::Value;

use super::{Service, intake};
use crate::protocol::anthropic::models::{self as anthropic, Model, Page};
use crate::protocol::errors::{ApiError, Code, ErrorDialect};
use crate::protocol::openai::models as openai;

/// GET /v1/models.
pub async fn list(request: HttpRequest, service: web::Data<Service>) -> HttpResponse {
    respond(&service, &request, |dialect| match dialect {
        ErrorDialect::Anthropic => {
            let query = web::Query::<Vec<(String, String)>>::from_query(request.query_string());
            let query = query.map_err(|e| ApiError::new(Code::InvalidValue, format!("the query is malformed: {e}")))?;
            Page::read(query.into_inner())?.list(described(&service))
        }
        _ => Ok(openai::list(&service.config.model.id, service.created)),
    })
}

/// GET /v1/models/{id}.
pub async fn one(request: HttpRequest, service: web::Data<Service>, id: web::Path<String>) -> HttpResponse {
    respond(&service, &request, |dialect| {
        service.check_model(&id)?;
        Ok(match dialect {
            ErrorDialect::Anthropic => anthropic::model(described(&service)),
            _ => openai::model(&id, service.created),
        })
    })
}

fn respond(
    service: &Service,
    request: &HttpRequest,
    body: impl FnOnce(ErrorDialect) -> Result<Value, ApiError>,
) -> HttpResponse {
    let dialect = ErrorDialect::of_request(request);
    match body(dialect) {
        Ok(body) => {
            let id = (dialect.id_header(), format!("req_{}", service.serial()));
            HttpResponse::Ok().insert_header(id).json(body)
        }
        Err(error) => intake::refuse(service, request, &error),
    }
}

fn described(service: &Service) -> Model<'_> {
    let limits = service.engine.limits();
    Model {
        id: &service.config.model.id,
        created: service.created,
        max_input_tokens: limits.max_prompt_tokens,
        max_tokens: limits.max_new_tokens,
    }
}

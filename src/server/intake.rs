//! What every request passes before its body is read as a dialect: the key, the content type, the size and the time it may take.

use actix_cors::CorsError;
use actix_web::body::{BoxBody, MessageBody};
use actix_web::dev::{Payload, ServiceRequest, ServiceResponse};
use actix_web::error::PayloadError;
use actix_web::http::header;
use actix_web::middleware::Next;
use actix_web::{Error, HttpRequest, HttpResponse, web};
use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;

use super::Service;
use crate::protocol::errors::{ApiError, Code, ErrorDialect, beginning};

/// Turns an error into the response of the path's dialect and counts the request as refused: the engine has not been given it.
pub fn refuse(service: &Service, request: &HttpRequest, refusal: &ApiError) -> HttpResponse {
    service.metrics.refused(refusal.code);
    error(service, request, refusal)
}

/// Turns an error into the response of the path's dialect.
pub fn error(service: &Service, request: &HttpRequest, error: &ApiError) -> HttpResponse {
    tracing::debug!(path = request.path(), code = error.code.name(), error = error.message, "request not served");
    error.response(ErrorDialect::of_request(request), &format!("req_{}", service.serial()))
}

/// Asks for the key, where one is configured.
pub async fn authorise(
    service: web::Data<Service>,
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<BoxBody>, Error> {
    let keys = &service.config.server.api_keys;
    if !keys.is_open() && !asks_no_key(request.path()) && !presented(&request).any(|given| keys.admit(given)) {
        let error = ApiError::new(
            Code::InvalidApiKey,
            "the API key is missing or wrong; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`",
        );
        let response = refuse(&service, request.request(), &error);
        return Ok(request.into_response(response));
    }
    Ok(next.call(request).await?.map_into_boxed_body())
}

/// Gives the refusal of another site's preflight, which the library writes as bare text, the body of the path's dialect.
///
/// # Errors
/// Those of the services inside.
pub async fn explain_preflight(
    service: web::Data<Service>,
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<BoxBody>, Error> {
    let response = next.call(request).await?;
    let Some(error) = response.response().error().and_then(Error::as_error::<CorsError>) else {
        return Ok(response.map_into_boxed_body());
    };
    let text = format!("this page may not call the server: {error}; see server.cors_origins");
    let refused = refuse(&service, response.request(), &ApiError::new(Code::InvalidValue, text));
    Ok(response.into_response(refused))
}

/// The keys that a request presents: some clients always send both headers, one of them with a placeholder.
fn presented(request: &ServiceRequest) -> impl Iterator<Item = &str> {
    let header = |name: &str| request.headers().get(name).and_then(|v| v.to_str().ok());
    let bearer = header("authorization").and_then(|v| v.split_once(' '));
    let bearer = bearer.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer")).map(|(_, key)| key.trim());
    bearer.into_iter().chain(header("x-api-key"))
}

/// Paths for those who watch the server, and the files of the page, which hold no data and ask for the key themselves.
fn asks_no_key(path: &str) -> bool {
    matches!(path, "/health" | "/ready") || crate::web::serves(path)
}

/// Reads a JSON body.
///
/// # Errors
/// Another content type, too many bytes, too slow, or the client broke off.
pub async fn body(service: &Service, request: &HttpRequest, payload: web::Payload) -> Result<Bytes, ApiError> {
    json_type(request)?;
    plain(request)?;
    let limit = service.config.server.body_limit_bytes;
    let too_large = || {
        ApiError::new(Code::PayloadTooLarge, format!("the body is over the limit of {limit} bytes; send a shorter one"))
    };
    let announced = request.headers().get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<usize>().ok());
    if announced.is_some_and(|length| length > limit) {
        return Err(too_large());
    }
    let mut payload: Payload = payload.into_inner();
    let read = async {
        let mut whole = BytesMut::with_capacity(announced.unwrap_or(0).min(65_536));
        while let Some(chunk) = payload.next().await {
            let chunk = chunk.map_err(|e| unreadable(&e))?;
            if whole.len() + chunk.len() > limit {
                return Err(too_large());
            }
            whole.extend_from_slice(&chunk);
        }
        Ok(whole.freeze())
    };
    match tokio::time::timeout(service.config.server.body_timeout, read).await {
        Ok(body) => body,
        Err(_) => {
            let limit = service.config.server.body_timeout.as_millis();
            let text = format!("the body did not arrive in time; send it within {limit} ms of its head");
            Err(ApiError::new(Code::RequestTimeout, text))
        }
    }
}

/// Why a body does not go on. Of a wrong chunk the library only says that the body ends there.
fn unreadable(error: &PayloadError) -> ApiError {
    let text = match error {
        PayloadError::Incomplete(_) | PayloadError::EncodingCorrupted => {
            "the body breaks off, or a chunk of it has no valid size; send it whole, with a content-length or in well-formed chunks"
                .to_owned()
        }
        other => format!("the body could not be read: {other}; send it whole"),
    };
    ApiError::new(Code::InvalidJson, text)
}

/// Compressed bodies are not read, so that a small one cannot become a large one.
fn plain(request: &HttpRequest) -> Result<(), ApiError> {
    let Some(given) = request.headers().get(header::CONTENT_ENCODING) else { return Ok(()) };
    if given.as_bytes().eq_ignore_ascii_case(b"identity") {
        return Ok(());
    }
    let text = format!(
        "the content encoding is {}; send the body as it is",
        beginning(given.to_str().unwrap_or("unreadable"))
    );
    Err(ApiError::new(Code::UnsupportedMediaType, text))
}

/// JSON is the only content type; a request without one is taken for it.
fn json_type(request: &HttpRequest) -> Result<(), ApiError> {
    let Some(given) = request.headers().get(header::CONTENT_TYPE) else { return Ok(()) };
    let essence = given.to_str().unwrap_or("").split(';').next().unwrap_or("").trim().to_ascii_lowercase();
    if essence == "application/json" || (essence.starts_with("application/") && essence.ends_with("+json")) {
        return Ok(());
    }
    let text = format!("the content type is {}; send application/json", beginning(&essence));
    Err(ApiError::new(Code::UnsupportedMediaType, text))
}

//! GET /health, /ready, /metrics and /stats.

use std::sync::atomic::Ordering;

use actix_web::{HttpResponse, web};
use serde_json::{Value, json};

use super::Service;
use crate::protocol::sampling::DEFAULT_SEED;
use crate::telemetry::metrics::CONTENT_TYPE;
use crate::telemetry::stats::Stats;

fn description(service: &Service, status: &str) -> Value {
    let (config, facts, limits) = (&service.config, service.engine.facts(), service.engine.limits());
    json!({
        "status": status,
        "model": config.model.id,
        "device": facts.device,
        "attention": config.attention.name(),
        "max_batch": config.limits.max_batch,
        "context": facts.context,
        "max_prompt_tokens": limits.longest_prompt(),
        "max_sequence_tokens": limits.longest_sequence(),
        "kv_pages": facts.pages,
        "profile": config.model.profile.name(),
        "sampling": {
            "greedy": true,
            "temperature": true,
            "top_k": true,
            "top_p": true,
            "min_p": true,
            "seed": true,
            "default_seed": DEFAULT_SEED,
            "default_mode": "greedy",
        },
    })
}

fn failed(service: &Service) -> Option<HttpResponse> {
    let fatal = service.engine.fatal();
    let reason = fatal.borrow();
    let reason = reason.as_ref()?;
    let mut body = description(service, "failed");
    body["error"] = json!(&**reason);
    Some(HttpResponse::ServiceUnavailable().json(body))
}

/// GET /health: 200 while the engine lives.
pub async fn health(service: web::Data<Service>) -> HttpResponse {
    failed(&service).unwrap_or_else(|| HttpResponse::Ok().json(description(&service, "ok")))
}

/// GET /ready: 200 while new work is taken.
pub async fn ready(service: web::Data<Service>) -> HttpResponse {
    if let Some(response) = failed(&service) {
        return response;
    }
    if service.draining.load(Ordering::Acquire) {
        return HttpResponse::ServiceUnavailable().json(description(&service, "draining"));
    }
    HttpResponse::Ok().json(description(&service, "ready"))
}

/// GET /metrics.
pub async fn metrics(service: web::Data<Service>) -> HttpResponse {
    HttpResponse::Ok().content_type(CONTENT_TYPE).body(service.metrics.render(&service.engine))
}

/// GET /stats.
pub async fn stats(service: web::Data<Service>) -> HttpResponse {
    let snapshot = service.engine.snapshot();
    HttpResponse::Ok().json(Stats::new(&snapshot, service.engine.permits(), service.metrics.uptime_seconds()))
}

//! The web page for people: static files inside the binary and the handlers that serve them. The page is a client of the native
//! API like any other; it asks for nothing outside this server, and its content security policy says so to the browser.

use std::sync::OnceLock;

use actix_web::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, ETAG, EntityTag, Header, IfNoneMatch, REFERRER_POLICY,
    X_CONTENT_TYPE_OPTIONS,
};
use actix_web::web::{Bytes, ServiceConfig, resource, route};
use actix_web::{HttpRequest, HttpResponse};
use sha2::{Digest, Sha256};

use crate::hex::hex;

/// Own files only; no inline script or style, no frame around the page, no form that leaves it.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
/// A browser asks each time and gets a 304 while nothing changed, so that a new binary is a new page at once.
const CACHING: &str = "no-cache";

/// One file of the page.
struct Asset {
    path: &'static str,
    content_type: &'static str,
    bytes: &'static [u8],
}

macro_rules! asset {
    ($path:literal, $file:literal, $content_type:literal) => {
        Asset { path: $path, content_type: $content_type, bytes: include_bytes!(concat!("assets/", $file)) }
    };
}

const SCRIPT: &str = "text/javascript; charset=utf-8";

macro_rules! script {
    ($file:literal) => {
        Asset {
            path: concat!("/assets/", $file),
            content_type: SCRIPT,
            bytes: include_bytes!(concat!("assets/", $file)),
        }
    };
}

/// Every file of the page.
static ASSETS: [Asset; 11] = [
    asset!("/", "index.html", "text/html; charset=utf-8"),
    asset!("/assets/style.css", "style.css", "text/css; charset=utf-8"),
    asset!("/assets/icon.svg", "icon.svg", "image/svg+xml"),
    script!("app.js"),
    script!("api.js"),
    script!("fit.js"),
    script!("gauges.js"),
    script!("probe.js"),
    script!("settings.js"),
    script!("sse.js"),
    script!("turn.js"),
];

/// Adds the page at `/` and its files under `/assets/`. GET and HEAD; other methods fall through to the service's own answer.
pub fn configure(service: &mut ServiceConfig) {
    for (at, asset) in ASSETS.iter().enumerate() {
        let handler = move |request: HttpRequest| async move { serve(&request, asset, etag(at)) };
        service.service(resource(asset.path).route(route().guard(actix_web::guard::fn_guard(reads)).to(handler)));
    }
}

/// Whether this path is a file of the page.
pub fn serves(path: &str) -> bool {
    ASSETS.iter().any(|asset| asset.path == path)
}

fn reads(context: &actix_web::guard::GuardContext<'_>) -> bool {
    matches!(context.head().method.as_str(), "GET" | "HEAD")
}

/// The strong entity tag of a file: its SHA-256, computed once.
fn etag(at: usize) -> EntityTag {
    static TAGS: OnceLock<Vec<String>> = OnceLock::new();
    let tag = |asset: &Asset| hex(&Sha256::digest(asset.bytes)[..16]);
    let tags = TAGS.get_or_init(|| ASSETS.iter().map(tag).collect());
    EntityTag::new_strong(tags[at].clone())
}

fn serve(request: &HttpRequest, asset: &'static Asset, etag: EntityTag) -> HttpResponse {
    let known = match IfNoneMatch::parse(request) {
        Ok(IfNoneMatch::Any) => true,
        Ok(IfNoneMatch::Items(tags)) => tags.iter().any(|tag| tag.weak_eq(&etag)),
        Err(_) => false,
    };
    let mut response = if known { HttpResponse::NotModified() } else { HttpResponse::Ok() };
    response
        .insert_header((ETAG, etag.to_string()))
        .insert_header((CACHE_CONTROL, CACHING))
        .insert_header((CONTENT_SECURITY_POLICY, POLICY))
        .insert_header((X_CONTENT_TYPE_OPTIONS, "nosniff"))
        .insert_header((REFERRER_POLICY, "no-referrer"));
    if known {
        return response.finish();
    }
    response.content_type(asset.content_type).body(Bytes::from_static(asset.bytes))
}

#[cfg(test)]
mod tests {
    use actix_web::http::StatusCode;
    use actix_web::http::header::{CONTENT_TYPE, IF_NONE_MATCH};
    use actix_web::test::{TestRequest, call_service, init_service, read_body};
    use actix_web::{App, rt};

    use super::*;

    #[test]
    fn every_file_is_served_with_its_type_and_a_tag_that_saves_the_second_fetch() {
        rt::System::new().block_on(async {
            let app = init_service(App::new().configure(configure)).await;
            for asset in &ASSETS {
                let response = call_service(&app, TestRequest::get().uri(asset.path).to_request()).await;
                assert_eq!(response.status(), StatusCode::OK, "{}", asset.path);
                assert_eq!(response.headers().get(CONTENT_TYPE).unwrap(), asset.content_type);
                assert_eq!(response.headers().get(X_CONTENT_TYPE_OPTIONS).unwrap(), "nosniff");
                let tag = response.headers().get(ETAG).unwrap().clone();
                assert_eq!(read_body(response).await, asset.bytes);

                let again = TestRequest::get().uri(asset.path).insert_header((IF_NONE_MATCH, tag.clone()));
                let response = call_service(&app, again.to_request()).await;
                assert_eq!((response.status(), response.headers().get(ETAG)), (StatusCode::NOT_MODIFIED, Some(&tag)));
                assert!(read_body(response).await.is_empty());

                let other = TestRequest::get().uri(asset.path).insert_header((IF_NONE_MATCH, "\"another\""));
                assert_eq!(call_service(&app, other.to_request()).await.status(), StatusCode::OK);
            }
        });
    }

    #[test]
    fn a_method_that_writes_is_not_taken() {
        rt::System::new().block_on(async {
            let app = init_service(App::new().configure(configure)).await;
            let response = call_service(&app, TestRequest::post().uri("/").to_request()).await;
            assert_eq!(response.status(), StatusCode::METHOD_NOT_ALLOWED);
        });
    }

    #[test]
    fn the_files_name_no_other_host_and_need_no_inline_code() {
        for asset in &ASSETS {
            let text = std::str::from_utf8(asset.bytes).unwrap();
            let text = text.replace("http://www.w3.org/2000/svg", "");
            for foreign in ["http://", "https://", "url(", "@import", "eval(", "innerHTML", " style=", " onclick="] {
                assert!(!text.contains(foreign), "{} contains {foreign:?}", asset.path);
            }
        }
    }

    #[test]
    fn every_file_that_the_files_name_is_served() {
        for asset in &ASSETS {
            let text = std::str::from_utf8(asset.bytes).unwrap();
            for (before, quote) in [("from \"./", '"'), ("\"/assets/", '"')] {
                for rest in text.split(before).skip(1) {
                    let name = rest.split(quote).next().unwrap();
                    let path = format!("/assets/{name}");
                    assert!(ASSETS.iter().any(|a| a.path == path), "{} names {path}", asset.path);
                }
            }
        }
    }
}

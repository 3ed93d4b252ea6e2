//! `server.cors_origins`: which pages of other sites may call this server from a browser.

use actix_web::http::Uri;

use super::fields::Fields;

/// Origins that browsers are told to let in.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum Origins {
    /// None: no CORS header is ever sent.
    #[default]
    None,
    /// Any.
    Any,
    /// These, each `scheme://host` or `scheme://host:port`.
    Listed(Vec<String>),
}

/// Reads the key: `[]`, `["*"]` or a list of origins.
pub fn origins(f: &mut Fields) -> Origins {
    let name = "server.cors_origins";
    let listed = f.texts(name);
    if listed == ["*"] {
        return Origins::Any;
    }
    for origin in listed.iter().filter(|origin| !is_origin(origin)) {
        let text = format!(
            "{name} holds \"{origin}\"; an origin is like \"https://chat.example.org\", and \"*\" stands alone"
        );
        f.reject(name, text);
    }
    for origin in &listed {
        if let Some(sent) = without_default_port(origin) {
            f.reject(name, format!("{name} holds \"{origin}\"; browsers send it as \"{sent}\": write that"));
        }
    }
    if listed.is_empty() { Origins::None } else { Origins::Listed(listed) }
}

/// What a browser sends as `Origin`: scheme, host and port, lower case, without a path.
fn is_origin(text: &str) -> bool {
    let Ok(uri) = text.parse::<Uri>() else { return false };
    let web = matches!(uri.scheme_str(), Some("http" | "https"));
    let bare = uri.authority().is_some_and(|a| text.ends_with(a.as_str()) && !a.as_str().contains('@'));
    web && bare && !text.bytes().any(|b| b.is_ascii_uppercase())
}

/// The origin as a browser sends it, when `text` spells its scheme's own port.
fn without_default_port(text: &str) -> Option<&str> {
    let port = if text.starts_with("https://") { ":443" } else { ":80" };
    text.strip_suffix(port).filter(|sent| is_origin(sent))
}

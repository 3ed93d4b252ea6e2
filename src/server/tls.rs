//! TLS: a certificate chain and its key from PEM files become the configuration of rustls, or an error that says which file is wrong.

use std::io;
use std::path::{Path, PathBuf};

use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::pki_types::pem::{Error as PemError, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// Why TLS cannot be offered.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file is missing or is no PEM.
    #[error("cannot read {key} = {path}: {reason}")]
    File {
        /// Its key in the configuration.
        key: &'static str,
        /// Where it is.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// Certificate and key do not belong together, or are of a kind that is not supported.
    #[error("server.tls_certificate and server.tls_key cannot be used together: {0}")]
    Pair(#[from] rustls::Error),
}

impl From<TlsError> for io::Error {
    fn from(error: TlsError) -> Self {
        io::Error::new(io::ErrorKind::InvalidInput, error.to_string())
    }
}

/// TLS 1.2 and 1.3 with this certificate chain (leaf first) and private key (PKCS#8, PKCS#1 or SEC1), both PEM; no client
/// certificates.
///
/// # Errors
/// Which file is wrong, or that they do not fit each other.
pub fn configuration(certificate: &Path, key: &Path) -> Result<ServerConfig, TlsError> {
    let chain = read("server.tls_certificate", certificate, |path| {
        let chain = CertificateDer::pem_file_iter(path)?.collect::<Result<Vec<_>, _>>()?;
        if chain.is_empty() { Err(PemError::NoItemsFound) } else { Ok(chain) }
    })?;
    let key = read("server.tls_key", key, |path| PrivateKeyDer::from_pem_file(path))?;
    let versions =
        ServerConfig::builder_with_provider(ring::default_provider().into()).with_safe_default_protocol_versions()?;
    Ok(versions.with_no_client_auth().with_single_cert(chain, key)?)
}

fn read<T>(key: &'static str, path: &Path, parse: impl FnOnce(&Path) -> Result<T, PemError>) -> Result<T, TlsError> {
    parse(path).map_err(|error| {
        let reason = match error {
            PemError::NoItemsFound => "it holds no PEM section of that kind".to_owned(),
            PemError::Io(error) => error.to_string(),
            other => other.to_string(),
        };
        TlsError::File { key, path: path.to_owned(), reason }
    })
}

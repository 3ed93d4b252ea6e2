//! Files that a measurement leaves: checked before it begins, and written so that what is there is whole.
//!
//! A new or regular file is written under a temporary name beside it and renamed; through a link, beside the link's target. A file that is
//! replaced keeps its mode. A fifo, a terminal or a device is written in place.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::limits;

/// A file cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {path}: {source}")]
pub struct WriteError {
    path: PathBuf,
    source: std::io::Error,
}

/// How a path is written.
#[derive(Debug, PartialEq, Eq)]
enum Place {
    /// A regular file or none yet, by its name behind all links.
    Replaced(PathBuf),
    /// Something else that is there.
    InPlace,
}

fn place(path: &Path) -> std::io::Result<Place> {
    if ["/dev", "/proc"].iter().any(|own| path.starts_with(own)) {
        // Also where /dev/stdout leads to a regular file: someone holds that open.
        return Ok(Place::InPlace);
    }
    let metadata = match std::fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Place::Replaced(end_of_links(path)?)),
        Err(e) => return Err(e),
    };
    if metadata.is_dir() {
        return Err(std::io::ErrorKind::IsADirectory.into());
    }
    if metadata.is_file() { Ok(Place::Replaced(std::fs::canonicalize(path)?)) } else { Ok(Place::InPlace) }
}

/// Where a file would be made: a link that leads nowhere yet names its target.
fn end_of_links(path: &Path) -> std::io::Result<PathBuf> {
    let mut path = path.to_owned();
    for _ in 0..LINKS_MAX {
        let Ok(target) = std::fs::read_link(&path) else { return Ok(path) };
        path = folder(&path).join(target);
    }
    Err(std::io::Error::other("too many links"))
}

/// Links that are followed.
const LINKS_MAX: usize = 40;

fn folder(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn temporary(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.part", std::process::id()));
    path.with_file_name(name)
}

/// Makes sure before a measurement that its files can be written, and that no two of them are one. Nothing is changed.
///
/// # Errors
/// The first path that is a folder, in a folder that is missing or cannot be written, or named twice.
pub fn check<'a>(paths: impl IntoIterator<Item = &'a Path>) -> Result<(), WriteError> {
    let mut taken: Vec<PathBuf> = Vec::new();
    for path in paths {
        let wrong = |source| WriteError { path: path.to_owned(), source };
        let end = match place(path).map_err(wrong)? {
            Place::InPlace => {
                let metadata = std::fs::metadata(path).map_err(wrong)?;
                // Opening a fifo would wait for its reader.
                if metadata.permissions().readonly() {
                    return Err(wrong(std::io::ErrorKind::PermissionDenied.into()));
                }
                std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned())
            }
            Place::Replaced(end) => {
                if end.is_file() {
                    OpenOptions::new().write(true).open(&end).map_err(wrong)?;
                }
                let part = temporary(&end);
                File::create(&part).and_then(|_| std::fs::remove_file(&part)).map_err(wrong)?;
                let name = end.file_name().unwrap_or_default().to_owned();
                std::fs::canonicalize(folder(&end)).map_err(wrong)?.join(name)
            }
        };
        if taken.contains(&end) {
            return Err(wrong(std::io::Error::other("another file of this run goes there too; give each its own")));
        }
        taken.push(end);
    }
    Ok(())
}

/// Reads a text that a measurement begins with.
///
/// # Errors
/// It cannot be read, is no UTF-8 or has more than `limits::FILE_BYTES`.
pub fn read(path: &Path) -> std::io::Result<String> {
    read_at_most(path, limits::FILE_BYTES.max)
}

fn read_at_most(path: &Path, most: u64) -> std::io::Result<String> {
    let mut text = String::new();
    // One byte more tells a file that is too long, or has no end, from one that just fits.
    File::open(path)?.take(most + 1).read_to_string(&mut text)?;
    if text.len() as u64 > most {
        return Err(std::io::Error::other(format!("it has more than {most} bytes; split it")));
    }
    Ok(text)
}

/// Writes a file, whole or not at all where it is a regular one.
///
/// # Errors
/// It cannot be written.
pub fn write(path: &Path, bytes: &[u8]) -> Result<(), WriteError> {
    let written = place(path).and_then(|place| match place {
        Place::InPlace => OpenOptions::new().append(true).open(path)?.write_all(bytes),
        Place::Replaced(end) => {
            let part = temporary(&end);
            let put = make_part(&part, &end).and_then(|(mut file, held)| {
                held.map_or(Ok(()), |held| file.set_permissions(held))?;
                file.write_all(bytes)?;
                std::fs::rename(&part, &end)
            });
            put.inspect_err(|_| drop(std::fs::remove_file(&part)))
        }
    });
    written.map_err(|source| WriteError { path: path.to_owned(), source })
}

/// Makes what will take the place of `end`, at no moment with more rights than that has, and tells the rights of that; the process's mask
/// may have taken some away.
fn make_part(part: &Path, end: &Path) -> std::io::Result<(File, Option<Permissions>)> {
    let held = std::fs::metadata(end).ok().map(|held| held.permissions());
    let mode = held.as_ref().map_or(NEW_MODE, PermissionsExt::mode);
    let _ = std::fs::remove_file(part);
    Ok((OpenOptions::new().write(true).create_new(true).mode(mode).open(part)?, held))
}

/// Of a new file, less what the process's mask takes away.
const NEW_MODE: u32 = 0o666;

/// Makes a folder with those above it.
///
/// # Errors
/// It cannot be made.
pub fn make_folder(path: &Path) -> Result<(), WriteError> {
    std::fs::create_dir_all(path).map_err(|source| WriteError { path: path.to_owned(), source })
}

/// Writes indented JSON.
///
/// # Errors
/// It cannot be written.
pub fn write_json(path: &Path, value: &impl Serialize) -> Result<(), WriteError> {
    encoded(path, serde_json::to_vec_pretty(value))
}

/// Writes JSON without a space, for files that no one reads by eye.
///
/// # Errors
/// It cannot be written.
pub fn write_json_compact(path: &Path, value: &impl Serialize) -> Result<(), WriteError> {
    encoded(path, serde_json::to_vec(value))
}

fn encoded(path: &Path, bytes: serde_json::Result<Vec<u8>>) -> Result<(), WriteError> {
    write(path, &bytes.map_err(|e| WriteError { path: path.to_owned(), source: e.into() })?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("crucible-file-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).expect("a folder");
        path
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(folder).expect("a folder").flatten();
        let mut names: Vec<String> = entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_link_stays_and_its_target_is_written_also_one_that_is_not_there_yet() {
        let folder = scratch("link");
        let (file, link, ahead) = (folder.join("file"), folder.join("link"), folder.join("ahead"));
        std::fs::write(&file, "old").expect("written");
        std::os::unix::fs::symlink("file", &link).expect("a link");
        std::os::unix::fs::symlink("later", &ahead).expect("a link");
        check([link.as_path(), &ahead]).expect("both can be written");
        assert_eq!(std::fs::read_to_string(&file).expect("read"), "old", "a check changes nothing");
        write(&link, b"new").expect("written");
        write(&ahead, b"later").expect("written");
        assert!(link.is_symlink() && ahead.is_symlink());
        assert_eq!(std::fs::read_to_string(&file).expect("read"), "new");
        assert_eq!(names(&folder), ["ahead", "file", "later", "link"], "nothing temporary is left");
        std::fs::remove_dir_all(&folder).expect("ours");
    }

    #[test]
    fn a_file_past_the_bound_or_without_an_end_is_refused() {
        let file = scratch("bound").join("file");
        std::fs::write(&file, "12345").expect("written");
        assert_eq!(read_at_most(&file, 5).expect("it fits"), "12345");
        assert!(read_at_most(&file, 4).expect_err("refused").to_string().contains("more than 4 bytes"));
        assert!(read_at_most(Path::new("/dev/zero"), 1000).is_err());
        std::fs::remove_dir_all(file.parent().expect("a folder")).expect("ours");
    }

    #[test]
    fn a_file_that_is_replaced_keeps_its_mode() {
        let folder = scratch("mode");
        let file = folder.join("file");
        std::fs::write(&file, "old").expect("written");
        let mode = || std::fs::metadata(&file).expect("a file").permissions().mode() & 0o777;
        for kept in [0o600, 0o666] {
            std::fs::set_permissions(&file, PermissionsExt::from_mode(kept)).expect("ours");
            let (part, _) = make_part(&folder.join("part"), &file).expect("made");
            let begun = part.metadata().expect("a file").permissions().mode() & 0o777;
            assert_eq!(begun & !kept, 0, "never more than what it replaces: {begun:o}");
            std::fs::remove_file(folder.join("part")).expect("ours");
            write(&file, b"new").expect("written");
            assert_eq!(mode(), kept);
        }
        std::fs::remove_dir_all(&folder).expect("ours");
        let lost = make_folder(Path::new("/proc/x")).expect_err("no folder is made there").to_string();
        assert!(lost.starts_with("cannot write /proc/x: "), "{lost}");
    }

    #[test]
    fn what_is_no_regular_file_is_written_in_place() {
        use std::os::unix::fs::FileTypeExt;
        write(Path::new("/dev/null"), b"x").expect("written");
        let kind = std::fs::metadata("/dev/null").expect("a device").file_type();
        assert!(kind.is_char_device());
    }

    #[test]
    fn a_folder_a_missing_parent_and_a_name_given_twice_are_refused_before_anything_is_measured() {
        let folder = scratch("check");
        let (a, same) = (folder.join("a"), folder.join(".").join("a"));
        let said = |paths: &[&Path]| check(paths.iter().copied()).expect_err("refused").to_string();
        assert!(said(&[&folder]).contains("directory"), "{}", said(&[&folder]));
        assert!(said(&[&folder.join("missing/a")]).contains("missing/a: "));
        assert!(said(&[&a, &same]).contains("give each its own"));
        check([a.as_path(), &folder.join("b")]).expect("two files");
        assert_eq!(names(&folder), Vec::<String>::new());
        std::fs::remove_dir_all(&folder).expect("ours");
    }
}

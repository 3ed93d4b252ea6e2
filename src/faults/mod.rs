//! Faults on purpose, for tests: a point in the code counts its visits and, at the armed one, panics or fails. Full disks and clients
//! that misbehave need nothing from here: tests/faults.rs makes them outside the process.
//!
//! Compiled only with the cargo feature `fault-injection`; every call site stands behind the same feature, so that a default build
//! holds neither the points nor a branch for them. A process arms its faults once, at its start (`serve --fault POINT=VISIT`).

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};

/// Where a fault can happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// Admission handles a submission: panics.
    Admission,
    /// The page allocator handles a reservation: panics.
    Pages,
    /// The planner retires a step: panics.
    Planner,
    /// The sampler digests a step: panics.
    Sampler,
    /// The scorer scores a slice of a prompt: panics.
    Scorer,
    /// The executor takes a step: panics.
    Executor,
    /// A session handles its news: panics.
    Session,
    /// The backend is given a step: fails.
    Step,
}

/// Every point and its name on the command line.
pub const POINTS: [(&str, Point); 8] = [
    ("admission", Point::Admission),
    ("pages", Point::Pages),
    ("planner", Point::Planner),
    ("sampler", Point::Sampler),
    ("scorer", Point::Scorer),
    ("executor", Point::Executor),
    ("session", Point::Session),
    ("step", Point::Step),
];

/// Visits that are left until the point's fault; 0 is none to come.
static ARMED: [AtomicU64; POINTS.len()] = [const { AtomicU64::new(0) }; POINTS.len()];

/// A fault to come: at which visit of which point, counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Where.
    pub point: Point,
    /// At which visit.
    pub visit: u64,
}

/// A fault that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} is no fault; write POINT=VISIT with a visit from 1 on and a point of {1}")]
pub struct FaultError(String, String);

impl FromStr for Fault {
    type Err = FaultError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let names = POINTS.map(|(name, _)| name).join(", ");
        let wrong = || FaultError(text.to_owned(), names.clone());
        let (name, visit) = text.split_once('=').ok_or_else(wrong)?;
        let (_, point) = POINTS.into_iter().find(|(known, _)| *known == name).ok_or_else(wrong)?;
        let visit = visit.parse().ok().filter(|&visit| visit > 0).ok_or_else(wrong)?;
        Ok(Self { point, visit })
    }
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(POINTS[*self as usize].0)
    }
}

/// Arms a fault.
pub fn arm(fault: Fault) {
    ARMED[fault.point as usize].store(fault.visit, Ordering::Release);
}

/// Counts a visit; whether it is the armed one.
fn strikes(point: Point) -> bool {
    let left = ARMED[point as usize].fetch_update(Ordering::AcqRel, Ordering::Acquire, |left| left.checked_sub(1));
    left == Ok(1)
}

/// Panics at the armed visit.
///
/// # Panics
/// On purpose.
pub fn panics(point: Point) {
    assert!(!strikes(point), "injected panic at the point {point}");
}

/// Fails at the armed visit.
///
/// # Errors
/// On purpose.
pub fn fails(point: Point) -> Result<(), String> {
    if strikes(point) { Err(format!("injected failure at the point {point}")) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_point_strikes_once_at_its_visit_and_no_other_point_does() {
        arm("step=3".parse().expect("a fault"));
        let struck: Vec<bool> = (0..6).map(|_| fails(Point::Step).is_err()).collect();
        assert_eq!(struck, [false, false, true, false, false, false]);
        panics(Point::Planner);
    }

    #[test]
    fn every_point_is_found_under_its_name_and_nothing_else_is() {
        for (name, point) in POINTS {
            assert_eq!(format!("{name}=7").parse(), Ok(Fault { point, visit: 7 }));
            assert_eq!(point.to_string(), name);
        }
        for wrong in ["step", "step=0", "step=x", "stepp=1", ""] {
            assert!(wrong.parse::<Fault>().is_err_and(|e| e.to_string().contains("session")), "{wrong}");
        }
    }
}

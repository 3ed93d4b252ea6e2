//! The page allocator's actor: answers reservations and takes dropped leases home.

pub mod messages;

use actix::{Actor, Addr, Context, Handler};

use self::messages::{Release, Reserve};
use super::admission::AdmissionActor;
use super::admission::messages::{Insufficient, PagesFreed, Reserved};
use crate::pages::{PageHome, Pool};

/// A thin shell over `pages::Pool`.
pub struct PagesActor {
    pub(super) pool: Pool,
    pub(super) home: PageHome,
    pub(super) admission: Addr<AdmissionActor>,
}

impl Actor for PagesActor {
    type Context = Context<Self>;
}

impl Handler<Reserve> for PagesActor {
    type Result = ();
    fn handle(&mut self, Reserve { request, pages }: Reserve, _: &mut Self::Context) {
        #[cfg(feature = "fault-injection")]
        crate::faults::panics(crate::faults::Point::Pages);
        match self.pool.reserve(request, pages, self.home.clone()) {
            Ok(lease) => self.admission.do_send(Reserved { lease }),
            Err(_) => self.admission.do_send(Insufficient { request }),
        }
    }
}

impl Handler<Release> for PagesActor {
    type Result = ();
    fn handle(&mut self, Release(returned): Release, _: &mut Self::Context) {
        let request = returned.request();
        self.pool.release(returned);
        self.admission.do_send(PagesFreed { request });
    }
}

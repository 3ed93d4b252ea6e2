//! The terminal: taken for the whole screen, and given back however the program ends (return, error, signal, panic).

use std::io::{self, Stdout, Write};
use std::sync::Once;

use crossterm::cursor::Show;
use crossterm::event::{DisableBracketedPaste, EnableBracketedPaste};
use crossterm::execute;
use crossterm::terminal::{EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode};
use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;

static PANIC_HOOK: Once = Once::new();

/// The terminal in raw mode on its alternate screen; dropping it restores it.
pub struct Screen {
    /// Draws on it.
    pub terminal: Terminal<CrosstermBackend<Stdout>>,
}

impl Screen {
    /// Takes the terminal. A panic anywhere in the process gives it back first, so that the message can be read.
    ///
    /// # Errors
    /// Standard output is no terminal, or it refuses a mode; what had been taken is given back.
    pub fn take() -> io::Result<Self> {
        PANIC_HOOK.call_once(|| {
            let next = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |info| {
                give_back();
                next(info);
            }));
        });
        enable_raw_mode()?;
        let taken = execute!(io::stdout(), EnterAlternateScreen, EnableBracketedPaste)
            .and_then(|()| Terminal::new(CrosstermBackend::new(io::stdout())));
        match taken {
            Ok(terminal) => Ok(Self { terminal }),
            Err(error) => {
                give_back();
                Err(error)
            }
        }
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        give_back();
    }
}

/// Restores every mode that [`Screen::take`] changed. Errors have nobody left to hear them.
fn give_back() {
    let _ = disable_raw_mode();
    let _ = execute!(io::stdout(), DisableBracketedPaste, LeaveAlternateScreen, Show);
    let _ = io::stdout().flush();
}

//! Replies on their way to the terminal: light Markdown as styles, and nothing that controls it.
//!
//! Only styles are added. Every character of the reply comes out at once, at its place, with its
//! markers: nothing is reflowed, held back or swallowed, so a half-finished or unusual document
//! looks plain at worst. Control characters other than newline and tab become U+FFFD: a reply must
//! not move the cursor, set the title or answer for the terminal. Where stdout is a file or a pipe,
//! the text passes as it is.
//!
//! Known are `# headings`, `**bold**`, `` `code` `` and fenced blocks. Styles other than that of a
//! block end with their line, so a stray marker costs a line at most.

#![forbid(unsafe_code)]

use std::io::IsTerminal;

const BOLD: &str = "\x1b[1m";
const DIM: &str = "\x1b[2m";
const CODE: &str = "\x1b[36m";
const RESET: &str = "\x1b[0m";

/// What is done to the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// Nothing.
    Raw,
    /// Control characters are replaced.
    Plain,
    /// And styles added.
    Styled,
}

impl Look {
    /// What suits stdout, and a person who wants no colour.
    pub fn of_stdout() -> Look {
        let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        match (std::io::stdout().is_terminal(), no_color) {
            (false, _) => Look::Raw,
            (true, true) => Look::Plain,
            (true, false) => Look::Styled,
        }
    }
}

/// Styles one reply, whatever pieces it comes in.
pub struct Painter {
    look: Look,
    /// The escape sequence in force; empty for none.
    shown: &'static str,
    /// The character that is repeated at the end of what came, and how often.
    run: (char, usize),
    line: Line,
    /// Backticks that opened the fenced block we are in; 0 outside.
    fence: usize,
}

/// What is known about the line so far.
#[derive(Default)]
struct Line {
    /// Characters before the run.
    chars: usize,
    /// All of them are spaces.
    is_blank: bool,
    is_heading: bool,
    is_bold: bool,
    /// Backticks that opened the code we are in; 0 outside.
    code: usize,
}

impl Line {
    fn start() -> Line {
        Line { is_blank: true, ..Line::default() }
    }
}

impl Painter {
    /// Before the first character.
    pub fn new(look: Look) -> Painter {
        let (line, run) = (Line::start(), ('\n', 0));
        Painter { look, shown: "", run, line, fence: 0 }
    }

    /// What stands before reasoning: nothing where it can be told by its style.
    pub fn opening(&self) -> &'static str {
        if self.look == Look::Styled { "" } else { "<think>" }
    }

    /// A piece that a reply gave when it took a token, ready to print; `was_thinking` before it,
    /// `is_thinking` behind it.
    pub fn piece(&mut self, text: &str, was_thinking: bool, is_thinking: bool) -> String {
        if !was_thinking || self.look != Look::Styled {
            return self.content(text);
        }
        match text.strip_suffix("</think>\n").filter(|_| !is_thinking) {
            Some(last) => self.reasoning(last) + self.end() + "\n\n",
            None => self.reasoning(text),
        }
    }

    fn content(&mut self, text: &str) -> String {
        self.paint(text, |painter, c| {
            painter.step(c);
            painter.style()
        })
    }

    /// Dimmed, without Markdown.
    fn reasoning(&mut self, text: &str) -> String {
        self.paint(text, |_, _| DIM)
    }

    /// What ends the styles in force.
    pub fn end(&mut self) -> &'static str {
        if std::mem::take(&mut self.shown).is_empty() { "" } else { RESET }
    }

    fn paint(
        &mut self,
        text: &str,
        mut style: impl FnMut(&mut Painter, char) -> &'static str,
    ) -> String {
        if self.look == Look::Raw {
            return text.to_string();
        }
        let mut out = String::new();
        for c in text.chars() {
            let style = style(self, c);
            if self.look == Look::Styled && style != self.shown {
                out.push_str(self.end());
                out.push_str(style);
                self.shown = style;
            }
            let controls = c.is_control() && c != '\n' && c != '\t';
            out.push(if controls { char::REPLACEMENT_CHARACTER } else { c });
        }
        out
    }

    /// The style of the character that [`Painter::step`] has just seen.
    fn style(&self) -> &'static str {
        match &self.line {
            _ if self.run.0 == '\n' => "",
            _ if self.fence > 0 => CODE,
            line if line.code > 0 => CODE,
            line if line.is_heading || line.is_bold => BOLD,
            _ => "",
        }
    }

    /// Takes one character. A run of markers means something once it has ended, so markers have
    /// the style of the text before them; the run that ends a line has no text to style.
    fn step(&mut self, c: char) {
        let (last, count) = self.run;
        if c == last && c != '\n' {
            self.run.1 += 1;
            return;
        }
        let line = &mut self.line;
        let starts_line = line.is_blank && line.chars < 4;
        match last {
            '`' if starts_line && self.fence == 0 && count >= 3 => {
                self.fence = count;
            }
            '`' if starts_line && self.fence > 0 && count >= self.fence && c == '\n' => {
                self.fence = 0
            }
            _ if self.fence > 0 => {}
            '`' if line.code == 0 => line.code = count,
            '`' if line.code == count => line.code = 0,
            '#' if line.chars == 0 && count <= 6 && c == ' ' => line.is_heading = true,
            '*' if line.code == 0 && count == 2 => line.is_bold = !line.is_bold && c != ' ',
            _ => {}
        }
        line.chars += count;
        line.is_blank &= last == ' ' || count == 0;
        if c == '\n' {
            self.line = Line::start();
        }
        self.run = (c, usize::from(c != '\n'));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# Head #1\nplain **bold é** and `co**de` 2 ** 3 **x\nnext ``a ` b``!\n\
                        ```rust\nlet **a** = `1`;\n# no head\n``\n```\n#no **b**: ***\n####### 7\n";

    /// Text without its escape sequences.
    fn unstyled(text: &str) -> String {
        let mut parts = text.split("\x1b[");
        let first = parts.next().unwrap().to_string();
        first + &parts.map(|part| part.split_once('m').unwrap().1).collect::<String>()
    }

    fn painted(look: Look, pieces: &[&str]) -> String {
        let mut painter = Painter::new(look);
        let text: String = pieces.iter().map(|piece| painter.content(piece)).collect();
        text + painter.end()
    }

    #[test]
    fn markdown_gets_styles_and_loses_no_character() {
        let got = painted(Look::Styled, &[TEXT]).replace(RESET, "}").replace(BOLD, "b{");
        let want = "#b{ Head #1}\nplain **b{bold é**} and `c{co**de`} 2 ** 3 **b{x}\n\
                    next ``c{a ` b``}!\n\
                    ```c{rust}\nc{let **a** = `1`;}\nc{# no head}\nc{``}\nc{```}\n\
                    #no **b{b**}: ***\n####### 7\n";
        assert_eq!(got.replace(CODE, "c{"), want);
        assert_eq!(unstyled(&painted(Look::Styled, &[TEXT])), TEXT);
        assert_eq!(painted(Look::Plain, &[TEXT]), TEXT);
    }

    #[test]
    fn a_cut_anywhere_changes_nothing() {
        let whole = painted(Look::Styled, &[TEXT]);
        for cut in (0..TEXT.len()).filter(|cut| TEXT.is_char_boundary(*cut)) {
            let (a, b) = TEXT.split_at(cut);
            assert_eq!(painted(Look::Styled, &[a, b]), whole, "cut at {cut}");
        }
        let chars: Vec<String> = TEXT.chars().map(String::from).collect();
        let pieces: Vec<&str> = chars.iter().map(String::as_str).collect();
        assert_eq!(painted(Look::Styled, &pieces), whole);
    }

    #[test]
    fn a_reply_cannot_control_the_terminal() {
        let evil = "a\x1b[2J\x1b]0;t\x07b\r\u{9b}31m\x7f\tc\n";
        let tame = "a\u{fffd}[2J\u{fffd}]0;t\u{fffd}b\u{fffd}\u{fffd}31m\u{fffd}\tc\n";
        assert_eq!(painted(Look::Styled, &[evil]), tame);
        assert_eq!(painted(Look::Plain, &[evil]), tame);
        assert_eq!(painted(Look::Raw, &[evil]), evil);
    }

    #[test]
    fn reasoning_is_dimmed_up_to_its_end_and_marked_where_there_are_no_styles() {
        let pieces =
            [("**hm\x1b", true, true), ("!</think>\n", true, false), ("</think>\n", false, false)];
        let painted = |look| {
            let mut painter = Painter::new(look);
            let text: String = pieces.map(|(text, was, is)| painter.piece(text, was, is)).concat();
            painter.opening().to_string() + &text + painter.end()
        };
        let styled = format!("{DIM}**hm\u{fffd}!{RESET}\n\n</think>\n");
        assert_eq!(painted(Look::Styled), styled);
        assert_eq!(painted(Look::Plain), "<think>**hm\u{fffd}!</think>\n</think>\n");
        assert_eq!(painted(Look::Raw), "<think>**hm\x1b!</think>\n</think>\n");
    }
}

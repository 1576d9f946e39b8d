"""The commands of a shell script, as far as they can be told without running it.

POSIX shell with bash's arrays. What only a run could tell (command substitution, positional parameters,
variables set under a condition) is marked with its name between two `MARK` characters, never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from kvwatch.blockmath.errors import Unsupported

MARK = "\0"
"""No argument of a program can contain it."""

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_PARAMETER = re.compile(r"([A-Za-z_]\w*)(\[[@*]\])?(?:(:?[-=?+])(.*))?", re.DOTALL)
_OPENERS = frozenset({"if", "for", "while", "until", "case", "select", "{"})
_CLOSERS = frozenset({"fi", "done", "esac", "}"})
_LEADERS = frozenset({*_OPENERS, *_CLOSERS, "then", "else", "elif", "do", "!", "time", "function"}) - {
    "for",
    "case",
    "select",
    "function",
}
_DECLARING = frozenset({"export", "declare", "readonly", "local", "typeset"})
_OPAQUE = frozenset({".", "source", "eval"})
"""Another file, or text made at run time, may set any variable."""

_MAX_NESTING = 20
_MAX_TEXT = 64 * 1024
MAX_COMMANDS = 2000
"""Of one script. A start script has a few dozen."""


@dataclass(frozen=True, slots=True)
class ShellCommand:
    """One simple command. Words and values with a `MARK` in them are not known.

    Attributes:
        environment: variables assigned before the command or exported earlier, and those of the caller.
        cwd: as ``cd`` left it; None where that is not known.
        whole_environment: nothing that the script runs could have set further variables.
    """

    words: tuple[str, ...]
    environment: Mapping[str, str]
    cwd: str | None
    whole_environment: bool = True


def unknown_part(words: tuple[str, ...]) -> str | None:
    """The name of the first thing that only a run could tell, None where all words are known."""
    return next((word.split(MARK)[1] for word in words if MARK in word), None)


def script_commands(text: str, environment: Mapping[str, str], cwd: str | None) -> list[ShellCommand]:
    """All simple commands of a script in order, those under conditions and in loops among them.

    Raises:
        Unsupported: quotes or parentheses do not close, or it is longer than any real one.
    """
    shell = _Shell(dict(environment), cwd)
    commands = list(islice(_Lexer(text).commands(), MAX_COMMANDS + 1))
    if len(commands) > MAX_COMMANDS:
        raise Unsupported("too_long", f"the script has more than {MAX_COMMANDS} commands")
    return [found for command in commands if (found := shell.run(command)) is not None]


# --- words ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece of a word: text, or an expansion to be made when the command runs."""

    text: str
    expansion: bool = False
    quoted: bool = False


@dataclass(slots=True)
class _Command:
    """Words as written.

    Attributes:
        conditional: it runs only if the command before it succeeded or failed, or in a shell of its own.
    """

    words: list[list[_Part]] = field(default_factory=list)
    conditional: bool = False


class _Lexer:
    """Cuts a script into commands, words and parts."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._command = _Command()
        self._word: list[_Part] | None = None
        self._target = False
        self._here: list[str] = []

    def commands(self) -> Iterator[_Command]:
        while self._at < len(self._text):
            character = self._take()
            if character in "\n;&|()":
                yield from self._end_command(character)
            elif character in " \t\r":
                self._end_word()
            elif character == "#" and self._word is None:
                self._skip_to_line_end()
            elif character in "<>":
                self._redirection(character)
            elif parts := list(self._piece(character)):
                self._word = self._word if self._word is not None else []
                self._word.extend(parts)
        yield from self._end_command("\n")

    def _take(self) -> str:
        self._at += 1
        return self._text[self._at - 1]

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _end_word(self) -> None:
        if self._word is None:
            return
        if self._target:
            self._target = False
        else:
            self._command.words.append(self._word)
        self._word = None

    def _end_command(self, separator: str) -> Iterator[_Command]:
        if separator == "(" and self._begins_array():
            self._array()
            return
        self._end_word()
        self._target = False
        doubled = separator in "&|" and self._next() == separator
        self._at += doubled
        if separator == "(" or (separator == "|" and not doubled):
            self._command.conditional = True
        if self._command.words:
            yield self._command
        self._command = _Command(conditional=doubled or separator in "|(")
        if separator == "\n":
            self._skip_here_documents()

    def _begins_array(self) -> bool:
        word = self._word
        return word is not None and len(word) == 1 and _ASSIGNMENT.fullmatch(word[0].text) is not None

    def _array(self) -> None:
        """``name=(a b)``: kept as one word per element, each an assignment of its own kind."""
        name = (self._word or [])[0].text
        self._word = None
        inner = _Lexer(self._balanced("(", ")"))
        elements = [word for command in inner.commands() for word in command.words]
        self._command.words.append([_Part(f"{name}(")])
        self._command.words.extend(elements)
        self._command.words.append([_Part(")")])

    def _redirection(self, character: str) -> None:
        if self._word is not None and all(part.text.isdigit() and not part.quoted for part in self._word):
            self._word = None
        self._end_word()
        if character == "<" and self._next() == "<":
            self._at += 1
            if self._next() != "<":
                self._here_document()
                return
        while self._next() in ("<", ">", "&", "|"):
            self._at += 1
        self._target = True

    def _here_document(self) -> None:
        match = re.compile(r"-?[ \t]*(['\"\\]?)([\w.-]+)['\"]?").match(self._text, self._at)
        if match is None:
            raise Unsupported("broken_script", "a here-document without a delimiter")
        self._at = match.end()
        self._here.append(match[2])

    def _skip_here_documents(self) -> None:
        for delimiter in self._here:
            while self._at < len(self._text):
                start = self._at
                self._skip_to_line_end()
                line = self._text[start : self._at]
                self._at += 1
                if line.lstrip("\t") == delimiter:
                    break
        self._here.clear()

    def _skip_to_line_end(self) -> None:
        end = self._text.find("\n", self._at)
        self._at = len(self._text) if end < 0 else end

    # --- pieces of a word ---

    def _piece(self, character: str) -> Iterator[_Part]:
        match character:
            case "\\":
                if self._next() == "\n":
                    self._at += 1
                elif self._next():
                    yield _Part(self._take(), quoted=True)
            case "'":
                yield _Part(self._until("'"), quoted=True)
            case '"':
                yield from self._double_quoted()
            case "$" | "`":
                yield self._expansion(character, quoted=False)
            case _:
                plain = re.compile(r"[^\s;&|()<>#\\'\"$`]*").match(self._text, self._at)
                rest = plain[0] if plain else ""
                self._at += len(rest)
                yield _Part(character + rest)

    def _double_quoted(self) -> Iterator[_Part]:
        yield _Part("", quoted=True)
        while (character := self._next()) != '"':
            if not character:
                raise Unsupported("broken_script", "a double quote is not closed")
            self._at += 1
            if character == "\\" and self._next() in ("$", "`", '"', "\\", "\n"):
                escaped = self._take()
                yield _Part("" if escaped == "\n" else escaped, quoted=True)
            elif character in "$`":
                yield self._expansion(character, quoted=True)
            else:
                plain = re.compile(r"[^\"\\$`]*").match(self._text, self._at)
                rest = plain[0] if plain else ""
                self._at += len(rest)
                yield _Part(character + rest, quoted=True)
        self._at += 1

    def _until(self, closing: str) -> str:
        end = self._text.find(closing, self._at)
        if end < 0:
            raise Unsupported("broken_script", f"a {closing} is not closed")
        found = self._text[self._at : end]
        self._at = end + 1
        return found

    def _expansion(self, character: str, *, quoted: bool) -> _Part:
        if character == "`":
            self._until("`")
            return _unknown("command output", quoted=quoted)
        following = self._next()
        if following == "(":
            self._at += 1
            self._balanced("(", ")")
            return _unknown("command output", quoted=quoted)
        if following == "{":
            self._at += 1
            return _Part(self._balanced("{", "}"), expansion=True, quoted=quoted)
        if name := _NAME.match(self._text, self._at):
            self._at = name.end()
            return _Part(name[0], expansion=True, quoted=quoted)
        if following and following in "@*#?!$-0123456789":
            self._at += 1
            return _unknown(f"${following}", quoted=quoted)
        if following in ("'", '"') and not quoted:
            return _unknown("$'…'", quoted=True)
        return _Part("$", quoted=quoted)

    def _balanced(self, opening: str, closing: str) -> str:
        """The text up to the bracket that closes one already open; quotes within hide brackets."""
        start, depth = self._at, 1
        while depth:
            character = self._next()
            if not character:
                raise Unsupported("broken_script", f"a {opening} is not closed")
            self._at += 1
            if character == "\\":
                self._at += 1
            elif character == "'":
                self._until("'")
            elif character == '"':
                for _ in self._double_quoted():
                    pass
            depth += (character == opening) - (character == closing)
        return self._text[start : self._at - 1]


def _unknown(name: str, *, quoted: bool) -> _Part:
    return _Part(f"{MARK}{name}{MARK}", quoted=quoted)


# --- running -------------------------------------------------------------------------------------------


class _Shell:
    """Variables as they stand before each command."""

    def __init__(self, environment: dict[str, str], cwd: str | None) -> None:
        self._variables = dict(environment)
        self._arrays: dict[str, list[str]] = {}
        self._exported = set(environment)
        self._cwd = cwd
        self._depth = 0
        self._opaque = False

    def run(self, command: _Command) -> ShellCommand | None:
        """Take note of one command; returns it unless it concerns the shell only."""
        words = self._without_leaders(command.words)
        sure = self._depth == 0 and not command.conditional
        if not words:
            return None
        if self._literal(words[0]) in ("for", "select", "case", "function"):
            self._loop_or_case(words)
            return None
        own: dict[str, str] = {}
        while words and (match := _ASSIGNMENT.match(words[0][0].text)) and not words[0][0].quoted:
            words = self._assign(match, words, own, sure=sure)
        if not words:
            for name, value in own.items():
                self._set(name, value, sure=sure)
            return None
        expanded = [text for word in words for text in self._expand(word)]
        if not expanded:
            return None
        return self._execute(expanded, words, own, sure=sure)

    def _without_leaders(self, words: list[list[_Part]]) -> list[list[_Part]]:
        while words and (first := self._literal(words[0])) in _LEADERS:
            self._nest(first)
            words = words[1:]
        return words

    def _nest(self, word: str) -> None:
        self._depth = max(0, self._depth + (word in _OPENERS) - (word in _CLOSERS))

    @staticmethod
    def _literal(word: list[_Part]) -> str:
        """The word where it is one plain unquoted text, else nothing."""
        return word[0].text if len(word) == 1 and not word[0].expansion and not word[0].quoted else ""

    def _loop_or_case(self, words: list[list[_Part]]) -> None:
        keyword = self._literal(words[0])
        if keyword != "function":
            self._depth += 1
        if keyword in ("for", "select") and len(words) > 1:
            name = self._literal(words[1])
            self._variables[name] = f"{MARK}{name}{MARK}"

    def _assign(
        self, match: re.Match[str], words: list[list[_Part]], own: dict[str, str], *, sure: bool
    ) -> list[list[_Part]]:
        name, appended = match[1], bool(match[2])
        first = words[0]
        if self._literal(first) == f"{match[0]}(":
            end = next(place for place, word in enumerate(words) if self._literal(word) == ")")
            elements = [text for word in words[1:end] for text in self._expand(word)]
            if not sure:
                elements = [f"{MARK}{name}{MARK}"]
            self._arrays[name] = [*(self._arrays.get(name, []) if appended else []), *elements]
            return words[end + 1 :]
        value = self._joined([_Part(first[0].text[match.end() :]), *first[1:]])
        if appended:
            before = own.get(name, self._variables.get(name))
            value = (before if before is not None else "") + value
        own[name] = value
        return words[1:]

    def _set(self, name: str, value: str, *, sure: bool) -> None:
        known = sure or self._variables.get(name) == value
        self._variables[name] = value if known else f"{MARK}{name}{MARK}"

    def _execute(
        self, expanded: list[str], words: list[list[_Part]], own: dict[str, str], *, sure: bool
    ) -> ShellCommand | None:
        program = expanded[0]
        handler: Callable[[list[str]], None] | None = {
            "cd": self._change_directory,
            "unset": self._forget,
            "read": self._doubt,
        }.get(program)
        if program in _DECLARING:
            self._declare(words[1:], sure=sure)
        elif program == "cd" and not sure:
            self._cwd = None
        elif program in _OPAQUE:
            self._become_opaque(expanded[1:])
        elif handler is not None:
            handler(expanded[1:])
        else:
            exported = {name: self._variables[name] for name in self._exported if name in self._variables}
            return ShellCommand(tuple(expanded), {**exported, **own}, self._cwd, not self._opaque)
        return None

    def _declare(self, words: list[list[_Part]], *, sure: bool) -> None:
        pending = list(words)
        while pending:
            match = _ASSIGNMENT.match(pending[0][0].text)
            if match:
                own: dict[str, str] = {}
                pending = self._assign(match, pending, own, sure=sure)
                for name, value in own.items():
                    self._set(name, value, sure=sure)
                self._exported.add(match[1])
            else:
                self._exported.add(self._literal(pending[0]))
                pending = pending[1:]

    def _become_opaque(self, arguments: list[str]) -> None:
        """Whatever has been set so far may be otherwise now; Python's ``activate`` leaves it alone."""
        if arguments and arguments[0].endswith("bin/activate"):
            return
        self._opaque = True
        self._variables = {name: f"{MARK}{name}{MARK}" for name in self._variables}
        self._arrays.clear()

    def _change_directory(self, arguments: list[str]) -> None:
        target = arguments[0] if len(arguments) == 1 and MARK not in arguments[0] else None
        if target is None or target.startswith(("~", "-")):
            self._cwd = None
        else:
            self._cwd = target if target.startswith("/") else self._cwd and f"{self._cwd}/{target}"

    def _forget(self, arguments: list[str]) -> None:
        for name in arguments:
            self._variables.pop(name, None)
            self._arrays.pop(name, None)

    def _doubt(self, arguments: list[str]) -> None:
        for name in arguments:
            self._variables[name] = f"{MARK}{name}{MARK}"

    # --- expansion ---

    def _expand(self, word: list[_Part]) -> list[str]:
        """A word as the arguments it becomes: unquoted values are split at blanks, empty ones vanish."""
        fields: list[str] = []
        current: str | None = None
        for part in word:
            if not part.expansion:
                current = (current or "") + part.text if part.text or part.quoted else current
                continue
            several = self._array_value(part.text)
            if several is None:
                value = self._parameter(part.text)
                several = [value] if part.quoted else re.split(r"[ \t\n]+", value)
            if not part.quoted and several == [""]:
                continue
            for number, piece in enumerate(several):
                if number and current is not None:
                    fields.append(current)
                    current = None
                current = piece if current is None else current + piece
        if current is not None:
            fields.append(current)
        return [field for field in fields if field or any(part.quoted for part in word)]

    def _joined(self, word: list[_Part]) -> str:
        """A word as one text, as on the right of an assignment."""
        return "".join(self._parameter(part.text) if part.expansion else part.text for part in word)

    def _array_value(self, text: str) -> list[str] | None:
        match = _PARAMETER.fullmatch(text)
        if match is None or match[2] is None:
            return None
        if match[3] or match[1] not in self._arrays:
            return [f"{MARK}{match[1]}{MARK}"]
        return self._arrays[match[1]]

    def _parameter(self, text: str, nesting: int = 0) -> str:
        match = _PARAMETER.fullmatch(text)
        if match is None or match[2] or nesting > _MAX_NESTING:
            return f"{MARK}{text[:40]}{MARK}"
        name, _, operator, alternative = match.groups()
        value = self._arrays[name][0] if self._arrays.get(name) else self._variables.get(name)
        if value is None and self._opaque:
            return f"{MARK}{name}{MARK}"
        given = value is not None and (value != "" or not (operator or "").startswith(":"))
        match (operator or "")[-1:], given:
            case ("-" | "=" | "?" | "", True):
                result = value or ""
            case ("-" | "=", False):
                result = self._alternative(alternative, nesting)
            case ("+", True):
                result = self._alternative(alternative, nesting)
            case ("+", False):
                result = ""
            case _:
                result = f"{MARK}{name}{MARK}"
        if operator in ("=", ":="):
            self._variables[name] = result
        if len(result) > _MAX_TEXT:
            raise Unsupported("dynamic_script", f"the value of {name} is longer than {_MAX_TEXT} characters")
        return result

    def _alternative(self, text: str, nesting: int) -> str:
        parts = _quoted_parts(text.replace('"', ""))
        return "".join(
            self._parameter(part.text, nesting + 1) if part.expansion else part.text for part in parts
        )


def _quoted_parts(text: str) -> list[_Part]:
    """The parts of a text as between double quotes."""
    commands = list(_Lexer(f'"{text}"').commands())
    return commands[0].words[0] if commands else []

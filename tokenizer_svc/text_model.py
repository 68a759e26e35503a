"""One model's text side: the prepared folder's tokenizer and chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from pagemesh.shared.errors import RequestError, StartupError
from pagemesh.shared.grammar import TOKENIZER_FILE
from pagemesh.shared.messages import Prompt
from pagemesh.shared.pooling import PoolingParams
from pagemesh.shared.prepared import PreparedModel
from pagemesh.shared.settings import ModelSettings, Settings
from pagemesh.shared.structured_outputs import StructuredOutputsParams
from pagemesh.shared.text_parsers import (
    NONE,
    REASONING_TAGS,
    TextParsers,
    marks_of,
    reasoning_parser_for,
    tool_parser_for,
)
from pagemesh.shared.wire import unpack_ids
from pagemesh.tokenizer_svc.chat_form import ChatForm
from pagemesh.tokenizer_svc.decode import TextDecoder, incremental_decoder
from pagemesh.tokenizer_svc.given_templates import GivenTemplates, template_variables
from pagemesh.tokenizer_svc.rules import Rules
from pagemesh.tokenizer_svc.templates import ChatTemplate
from pagemesh.tokenizer_svc.vocabulary import Vocabulary

TEMPLATE_FILE: Final = "chat_template.jinja"
# More than the longest tag and the white space that templates write behind it.
_TAIL_CHARS: Final = 64
# Tokens in front of a text with a gap, in the gap and behind it all, in several families.
_GAP_MARKS: Final = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)
_CONTINUE_MARK: Final = "continue-here-5d1f "


class TextModel:
    """Text to ids and back. Immutable, so that threads may share it.

    Raises StartupError when the folder's tokenizer or template cannot be used.
    """

    def __init__(self, folder: Path, prepared: PreparedModel, settings: Settings) -> None:
        self.prepared = prepared
        self.names: Final = settings.model.served_model_name or [prepared.name]
        self.vocabulary = _load_vocabulary(folder / TOKENIZER_FILE)
        self.rules = Rules(folder, prepared)
        self._pooling = settings.model.pooling
        self._template = _load_template(folder / TEMPLATE_FILE, prepared)
        self._form = ChatForm(self._template) if self._template is not None else None
        self._given_templates = GivenTemplates(prepared.template_tokens)
        self.parsers: Final = self._text_parsers(settings.model)
        self._hidden = {
            keeps: self.vocabulary.hidden(
                skip_special_tokens=True, kept=marks_of(self.parsers) if keeps else ()
            )
            for keeps in (False, True)
        }

    def pooling(self, asked: PoolingParams | None) -> PoolingParams | None:
        """`asked` with nothing left open."""
        if asked is None or asked.pooling is not None:
            return asked
        return replace(asked, pooling=self._pooling)

    def encode(self, prompt: Prompt) -> list[int]:
        """The ids of `prompt`, possibly none. Raises RequestError for what cannot be one."""
        return self.encode_as(prompt, self.text_of(prompt))

    def text_of(self, prompt: Prompt) -> str | None:
        """The text of `prompt`, rendered if it is a chat; None when it was given as ids."""
        if prompt.token_ids is not None:
            return None
        if prompt.messages is not None:
            return self.render(prompt)
        text, extras = prompt.text or "", prompt.extras
        return text if extras is None else self._with_suffix(text, extras.suffix)

    def encode_as(self, prompt: Prompt, text: str | None) -> list[int]:
        """`encode` when `text_of(prompt)` is known already."""
        if text is None:
            return self.checked_ids(prompt.token_ids or b"", param=prompt.field)
        # A template writes the BOS itself; adding one here would double it.
        add_special = prompt.messages is None and prompt.add_special_tokens
        return self._encode_text(text, add_special_tokens=add_special)

    def render(self, prompt: Prompt) -> str:
        """The text of a chat. Raises RequestError (400), with the template's own message."""
        template, form, extras = self._template, self._form, prompt.extras
        if extras is not None and extras.chat_template:
            template, form = self._given_templates(extras.chat_template)
        if template is None or form is None:
            raise RequestError(
                "this model has no chat template: use completions, or start the server with "
                "--chat-template",
                param="messages",
            )
        if not prompt.messages:
            raise RequestError("messages must not be empty", param="messages")
        chat = form.chat(prompt.messages, prompt.tools)
        variables = prompt.template_kwargs
        if extras is not None:
            thinks = self.parsers.reasoning != NONE
            variables = {**template_variables(extras, template, thinks=thinks), **variables}
        if prompt.tools:
            variables = {**variables, "tools": prompt.tools}
        if prompt.continue_final_message:
            return _render_continued(template, chat, variables)
        return template.render(
            chat,
            add_generation_prompt=prompt.add_generation_prompt,
            variables=variables,
        )

    def _with_suffix(self, text: str, suffix: str) -> str:
        """A gap to fill, if there is a suffix, in the words that the model was trained on. Raises
        RequestError (400) for a model that has none."""
        if not suffix:
            return text
        known = self.vocabulary.tokenizer.token_to_id
        marks = next((each for each in _GAP_MARKS if None not in map(known, each)), None)
        if marks is None:
            raise RequestError(
                "suffix cannot be used: this model's tokenizer has no tokens for a gap to fill",
                code="unsupported_parameter",
                param="suffix",
            )
        before, gap, behind = marks
        return f"{before}{text}{gap}{suffix}{behind}"

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return self.vocabulary.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def decoder(self, *, skip_special_tokens: bool, keeps_marks: bool = False) -> TextDecoder:
        """With `keeps_marks` what the model's parsers look for is never skipped."""
        hidden = self._hidden[keeps_marks] if skip_special_tokens else frozenset()
        return incremental_decoder(self.vocabulary, hidden)

    def in_reasoning(self, prompt: Prompt, text: str | None) -> bool:
        """Whether `text`, that of `prompt`, ends with the tag that opens the reasoning."""
        tags = REASONING_TAGS.get(self.parsers.reasoning)
        if tags is None or text is None or prompt.messages is None:
            return False
        return text[-_TAIL_CHARS:].rstrip().endswith(tags[0])

    def after_reasoning(
        self, rule: StructuredOutputsParams, prompt: Prompt, text: str | None
    ) -> StructuredOutputsParams:
        """`rule` for an answer to `prompt`, whose text is `text`: it holds behind what the model
        thinks first, if single tokens mark that."""
        tags, end_id = REASONING_TAGS.get(self.parsers.reasoning), self.parsers.reasoning_end_id
        if tags is None or end_id is None or text is None or prompt.messages is None:
            return rule
        if self.in_reasoning(prompt, text):
            return replace(rule, begins_after=end_id)
        opening_id = self.vocabulary.tokenizer.token_to_id(tags[0])
        has_thought = text[-_TAIL_CHARS:].rstrip().endswith(tags[1])
        if opening_id is None or has_thought:
            return rule
        return replace(rule, begins_after=end_id, opened_by=opening_id)

    def token_str(self, token_id: int) -> str:
        return self.vocabulary.token_str(token_id)

    def checked_ids(self, token_ids: bytes, *, param: str) -> list[int]:
        """Unpacked ids, all in the vocabulary. Raises RequestError (400) otherwise."""
        try:
            ids = unpack_ids(token_ids)
        except ValueError as error:
            raise RequestError("token ids must be whole numbers", param=param) from error
        self.check_vocabulary(ids, param=param)
        return ids

    def check_vocabulary(self, token_ids: list[int], *, param: str) -> None:
        """Raises RequestError (400) naming the first id that the model does not have."""
        size = self.prepared.vocab_tokens
        if not token_ids or (min(token_ids) >= 0 and max(token_ids) < size):
            return
        bad = next(i for i in token_ids if not 0 <= i < size)
        raise RequestError(
            f"{param} holds token id {bad}, which is not in the vocabulary (0 to {size - 1})",
            param=param,
        )

    def _text_parsers(self, settings: ModelSettings) -> TextParsers:
        """Those of the settings, or else those that the template asks for."""
        if self._template is None or self._form is None:
            return TextParsers()
        tools: str = settings.tool_call_parser
        reasoning: str = settings.reasoning_parser
        if tools == "auto":
            tools = tool_parser_for(self._template.source, knows_tools=self._form.knows_tools)
        if reasoning == "auto":
            reasoning = reasoning_parser_for(self._template.source)
        tags = REASONING_TAGS.get(reasoning)
        end_id = self.vocabulary.tokenizer.token_to_id(tags[1]) if tags else None
        return TextParsers(tools, reasoning, end_id)

    def _encode_text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """`encode_batch_fast` lets other threads run meanwhile, which `encode` does not."""
        tokenizer = self.vocabulary.tokenizer
        try:
            encodings = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise RequestError(
                "the prompt holds half of a surrogate pair, which is no Unicode character"
            ) from error
        ids: list[int] = encodings[0].ids
        bos = self.prepared.bos_token_id
        if add_special_tokens and bos is not None and ids[:2] == [bos, bos]:
            return ids[1:]
        return ids


def _render_continued(
    template: ChatTemplate, chat: list[dict[str, Any]], variables: dict[str, Any]
) -> str:
    """The chat up to the end of its last message, so that the model goes on with it."""
    last = chat[-1]
    content = last["content"]
    if isinstance(content, str):
        last["content"] = content + _CONTINUE_MARK
    elif content:
        content[-1] = {**content[-1], "text": content[-1]["text"] + _CONTINUE_MARK}
    text = template.render(chat, add_generation_prompt=False, variables=variables)
    end = text.rfind(_CONTINUE_MARK.rstrip())
    if end < 0:
        raise RequestError(
            "continue_final_message: the chat template drops the last message's text",
            param="continue_final_message",
        )
    kept_spacing = text.startswith(_CONTINUE_MARK, end)
    return text[:end] if kept_spacing else text[:end].rstrip()


def _load_vocabulary(path: Path) -> Vocabulary:
    try:
        return Vocabulary(path.read_bytes())
    except OSError as error:
        raise StartupError(
            f"{path} is missing: run `pagemesh prepare MODEL` with the same settings first"
        ) from error
    # tokenizers raises bare exceptions for a file it cannot read.
    except Exception as error:
        raise StartupError(
            f"{path} is damaged ({error}): delete {path.parent} and prepare again"
        ) from error


def _load_template(path: Path, prepared: PreparedModel) -> ChatTemplate | None:
    if not path.is_file():
        return None
    return ChatTemplate(path.read_text(encoding="utf-8"), prepared.template_tokens)

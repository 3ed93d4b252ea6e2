"""The official `anthropic` package against the real server. Answers are validated against the package's own types, strictly.

The package's methods no longer take temperature, top_k and top_p; the interface does, and they go through `extra_body`, the
package's way for fields it does not name.
"""

import time

import anthropic
from anthropic import Anthropic, AsyncAnthropic

import shared
from support import FRANCE, MODEL, PATIENCE, STORY, USER, Suite

EVENTS = ["message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop"]


def client(server, kind=Anthropic, **options):
    options = {"max_retries": 0, "timeout": PATIENCE, "api_key": server.key or "none"} | options
    return kind(base_url=server.url, _strict_response_validation=True, **options)


def sampled(**fields):
    """Fields that the package does not name."""
    return {"extra_body": {"temperature": 0} | fields}


class Case(shared.Speaks, Suite):
    package, Async, Overloaded = anthropic, AsyncAnthropic, anthropic.OverloadedError

    def connect(self, server, kind=Anthropic, **options):
        return client(server, kind, **options)

    def calls(self, client):
        return client.messages

    def sampling(self, **fields):
        return sampled(**fields)

    def check_full(self, error):
        self.assertEqual((error.status_code, error.type), (529, "overloaded_error"))

    def text_of(self, answer):
        [block] = answer.content
        return block.text

    def tokens_of(self, answer):
        return answer.usage.output_tokens

    def piece_of(self, event):
        return event.delta.text if event.type == "content_block_delta" else ""

    async def streamed(self, client, **fields):
        async with client.messages.stream(**fields) as stream:
            return "".join([piece async for piece in stream.text_stream])

    def setUp(self):
        super().setUp()
        self.client = client(self.open)
        self.addCleanup(self.client.close)

    def ask(self, **fields):
        return self.client.messages.create(**self.fields(**fields))

    def spelled(self, events):
        """The text of a raw stream."""
        return "".join(map(self.piece_of, events))


class Models(Case):
    def test_the_list_holds_the_one_model_that_is_served(self):
        page = self.client.models.list(limit=10)
        [model] = page.data
        self.assertEqual((model.id, model.type, model.lifecycle), (MODEL, "model", "active"))
        self.assertEqual((page.has_more, page.first_id, page.last_id), (False, MODEL, MODEL))
        self.assertLess(abs(model.created_at.timestamp() - time.time()), 3600)
        self.assertEqual([m.id for m in self.client.models.list()], [MODEL], "the package's own paging ends")

    def test_a_model_can_be_asked_for_by_its_id(self):
        self.assertEqual(self.client.models.retrieve(MODEL), self.client.models.list().data[0])

    def test_another_model_is_not_found(self):
        with self.assertRaises(anthropic.NotFoundError) as caught:
            self.client.models.retrieve("claude-opus-4-1")
        self.assertEqual((caught.exception.type, caught.exception.error_code), ("not_found_error", "model_not_found"))


class Messages(shared.Text, Case):
    def test_a_whole_answer_has_every_field(self):
        answer = self.ask()
        self.assertRegex(answer.id, r"^msg_\w+$")
        self.assertEqual((answer.type, answer.role, answer.model), ("message", "assistant", MODEL))
        self.assertEqual((answer.stop_reason, answer.stop_sequence), ("end_turn", None))
        [block] = answer.content
        self.assertEqual((block.type, block.citations), ("text", None))
        self.assertIn("Paris", block.text)
        self.assertRegex(answer._request_id, r"^req_\w+$")

    def test_a_stream_has_the_documented_events_in_the_documented_order(self):
        events = list(self.ask(stream=True))
        kinds = [e.type for e in events]
        self.assertEqual(list(dict.fromkeys(kinds)), EVENTS)
        for kind in EVENTS:
            if kind != "content_block_delta":
                self.assertEqual(kinds.count(kind), 1, kind)
        start = events[0].message
        self.assertEqual((start.content, start.stop_reason, start.stop_sequence), ([], None, None))
        self.assertEqual((events[1].index, events[1].content_block.text), (0, ""))
        self.assertTrue(all(e.index == 0 and e.delta.type == "text_delta" for e in events if e.type == "content_block_delta"))
        self.assertEqual(events[-2].delta.stop_reason, "end_turn")
        self.assertGreater(kinds.count("content_block_delta"), 3, "in pieces")

    def test_a_stream_is_the_whole_answer_in_pieces(self):
        whole = self.ask()
        events = list(self.ask(stream=True))
        self.assertEqual(self.spelled(events), whole.content[0].text)
        self.assertEqual(events[0].message.usage.input_tokens, whole.usage.input_tokens)
        self.assertEqual(events[-2].usage.output_tokens, whole.usage.output_tokens)

    def test_the_streaming_helper_of_the_package_builds_the_same_answer(self):
        whole = self.ask()
        with self.client.messages.stream(model=MODEL, messages=USER, max_tokens=24, **sampled()) as stream:
            pieces = list(stream.text_stream)
            final = stream.get_final_message()
            self.assertEqual(stream.get_final_text(), whole.content[0].text)
        self.assertEqual("".join(pieces), whole.content[0].text)
        self.assertEqual(([block.text for block in final.content], final.stop_reason),
                         ([block.text for block in whole.content], whole.stop_reason))
        self.assertEqual((final.usage.input_tokens, final.usage.output_tokens),
                         (whole.usage.input_tokens, whole.usage.output_tokens))

    def test_usage_counts_the_tokens_of_the_template_and_of_the_answer(self):
        story = [{"role": "user", "content": STORY}]
        answer = self.ask(messages=story, max_tokens=7)
        self.assertEqual(answer.usage.input_tokens, len(self.open.tokenize(messages=story)))
        self.assertEqual((answer.usage.output_tokens, answer.stop_reason), (7, "max_tokens"))
        self.assertEqual((answer.usage.cache_read_input_tokens, answer.usage.cache_creation_input_tokens), (0, 0))

    def test_counting_says_what_a_request_reports(self):
        conversations = [
            dict(messages=USER),
            dict(messages=USER, system="You are a pirate."),
            dict(messages=[*USER, {"role": "assistant", "content": "Paris."}, {"role": "user", "content": "And of Italy?"}]),
            dict(messages=[*USER, {"role": "assistant", "content": "The answer is"}]),
            dict(messages=[{"role": "user", "content": "你好 🎉"}], system=[{"type": "text", "text": "Be brief."}]),
        ]
        for fields in conversations:
            counted = self.client.messages.count_tokens(model=MODEL, **fields).input_tokens
            self.assertEqual(self.ask(max_tokens=1, **fields).usage.input_tokens, counted, fields)

    def test_a_stop_sequence_ends_the_answer_before_itself_and_is_named(self):
        text = self.said()
        answer = self.ask(stop_sequences=["nowhere", "Paris"])
        self.assertEqual(answer.content[0].text, text[: text.index("Paris")])
        self.assertEqual((answer.stop_reason, answer.stop_sequence), ("stop_sequence", "Paris"))
        events = list(self.ask(stop_sequences=["nowhere", "Paris"], stream=True))
        self.assertEqual(self.spelled(events), answer.content[0].text, "nothing of it leaks")
        self.assertEqual((events[-2].delta.stop_reason, events[-2].delta.stop_sequence), ("stop_sequence", "Paris"))

    def test_the_system_prompt_is_text_or_blocks(self):
        plain = self.ask(system="You are a pirate.")
        block = {"type": "text", "text": "You are a pirate.", "cache_control": {"type": "ephemeral"}}
        blocks = self.ask(system=[block])
        self.assertEqual((plain.content, plain.usage), (blocks.content, blocks.usage))
        self.assertNotEqual(plain.usage.input_tokens, self.ask().usage.input_tokens)

    def test_content_is_text_or_blocks_and_turns_of_one_role_are_one(self):
        plain = self.ask()
        half = len(FRANCE) // 2
        blocks = [{"type": "text", "text": FRANCE[:half]}, {"type": "text", "text": FRANCE[half:]}]
        self.assertEqual(self.ask(messages=[{"role": "user", "content": blocks}]).content, plain.content)
        turns = [{"role": "user", "content": FRANCE[:half]}, {"role": "user", "content": FRANCE[half:]}]
        self.assertEqual(self.ask(messages=turns).usage, plain.usage)

    def test_a_last_turn_of_the_assistant_is_continued(self):
        whole = self.said()
        head = whole[: whole.index("Paris")].rstrip()
        rest = self.said(messages=[*USER, {"role": "assistant", "content": head}])
        self.assertEqual(head + rest, whole, "the answer goes on where it was left")

    def test_an_answer_goes_back_in_as_a_turn(self):
        first = self.ask()
        turn = {"role": "assistant", "content": first.content}
        self.assertIn("Rome", self.said(messages=[*USER, turn, {"role": "user", "content": "And of Italy?"}]))

    def test_sampling_is_repeated_by_a_seed_and_narrowed_by_its_fields(self):
        story = [{"role": "user", "content": STORY}]
        warm = lambda **fields: self.said(messages=story, **sampled(temperature=1, **fields))
        self.assertEqual(warm(seed=7), warm(seed=7))
        self.assertNotEqual(warm(seed=7), warm(seed=8))
        self.assertEqual(warm(seed=7, top_k=1), self.said(messages=story), "one candidate is greedy")
        self.assertEqual(warm(seed=7, top_p=0), self.said(messages=story))
        self.assertNotEqual(self.said(messages=story, max_tokens=32, extra_body={}), self.said(messages=story, max_tokens=32, extra_body={}),
                            "temperature 1 and a fresh seed by default")

    def test_values_without_effect_pass(self):
        plain = self.said()
        same = self.said(tools=[], thinking={"type": "disabled"}, metadata={"user_id": "me"}, service_tier="auto")
        self.assertEqual(same, plain)

    def test_a_raw_response_carries_the_request_id(self):
        raw = self.client.messages.with_raw_response.create(model=MODEL, messages=USER, max_tokens=2)
        self.assertRegex(raw.headers["request-id"], r"^req_\w+$")
        self.assertEqual(raw.parse()._request_id, raw.headers["request-id"])


class Errors(shared.Refusals, Case):
    def refused(self, kind, call, **fields):
        error = super().refused(kind, call, **fields)
        self.assertRegex(error.request_id, r"^req_\w+$")
        self.assertEqual(error.body["request_id"], error.request_id)
        self.assertEqual(error.body["type"], "error")
        return error

    def test_wrong_values_are_bad_requests_that_name_the_field(self):
        wrong = [("max_tokens", 0), ("messages", []), ("stop_sequences", [""]), ("stream", "yes"), ("system", 3)]
        for field, value in wrong:
            error = self.refused(anthropic.BadRequestError, self.ask, **{field: value})
            self.assertEqual((error.status_code, error.type), (400, "invalid_request_error"), field)
            self.assertIn(field, error.api_message)
        for field, value in [("temperature", 1.1), ("temperature", -1), ("top_p", 2), ("top_k", -1), ("top_k", 1.5)]:
            error = self.refused(anthropic.BadRequestError, self.ask, **sampled(**{field: value}))
            self.assertIn(field, error.api_message)

    def test_what_is_not_served_is_refused_by_name(self):
        tool = {"name": "f", "input_schema": {"type": "object"}}
        for field, value in [("tools", [tool]), ("thinking", {"type": "enabled", "budget_tokens": 1024}),
                             ("thinking", {"type": "adaptive"}), ("container", "c"), ("inference_geo", "eu"),
                             ("output_config", {"effort": "low"}), ("tool_choice", {"type": "any"}), ("speed", "fast")]:
            error = self.refused(anthropic.BadRequestError, self.ask, **{field: value})
            self.assertIn(field, error.api_message)
            self.assertEqual(error.error_code, "unsupported_parameter")

    def test_an_image_and_a_document_are_refused_where_they_stand(self):
        source = {"type": "base64", "media_type": "image/png", "data": "AA=="}
        for kind in ("image", "document"):
            content = [{"type": "text", "text": "x"}, {"type": kind, "source": source}]
            error = self.refused(anthropic.BadRequestError, self.ask, messages=[{"role": "user", "content": content}])
            self.assertIn("messages[0].content[1]", error.api_message)

    def test_an_unknown_field_is_refused_and_not_ignored(self):
        error = self.refused(anthropic.BadRequestError, self.ask, **sampled(temprature=1))
        self.assertIn("temprature", error.api_message)

    def test_a_conversation_over_the_context_says_so(self):
        long = [{"role": "user", "content": "word " * 20_000}]
        error = self.refused(anthropic.BadRequestError, self.ask, messages=long)
        self.assertEqual(error.error_code, "context_length_exceeded")

    def test_another_model_is_not_found(self):
        for call in (self.ask, lambda **fields: self.client.messages.count_tokens(messages=USER, **fields)):
            error = self.refused(anthropic.NotFoundError, call, model="claude-opus-4-1")
            self.assertEqual((error.type, error.error_code), ("not_found_error", "model_not_found"))

    def test_an_endpoint_that_does_not_exist_is_not_found(self):
        error = self.refused(anthropic.NotFoundError, self.client.messages.batches.retrieve, message_batch_id="x")
        self.assertEqual(error.type, "not_found_error")

    def test_a_body_over_the_limit_is_content_too_large(self):
        with client(self.tight) as small:
            long = [{"role": "user", "content": "x" * 20_000}]
            error = self.refused(anthropic.ContentTooLargeError, small.messages.create, model=MODEL, messages=long, max_tokens=1)
        self.assertEqual((error.status_code, error.type), (413, "request_too_large"))

    def test_a_wrong_or_missing_key_is_an_authentication_error(self):
        fields = dict(model=MODEL, messages=USER, max_tokens=1)
        for options in ({}, {"api_key": None, "auth_token": self.keyed.key}):
            with client(self.keyed, **options) as right:
                self.assertEqual(right.messages.create(**fields).usage.output_tokens, 1)
        with client(self.keyed, api_key="wrong") as wrong:
            for call in (lambda: wrong.messages.create(**fields), lambda: wrong.models.list()):
                error = self.refused(anthropic.AuthenticationError, call)
                self.assertEqual((error.status_code, error.type), (401, "authentication_error"))

    def test_z_a_dead_engine_is_an_internal_server_error_and_ends_a_stream_with_an_error(self):
        with client(self.doomed) as dead:
            fields = dict(model=MODEL, messages=[{"role": "user", "content": "word " * 2000}], max_tokens=8)
            with self.assertRaises(anthropic.APIStatusError) as caught:
                list(dead.messages.create(stream=True, **fields))
            self.assertEqual((caught.exception.type, caught.exception.error_code), ("api_error", "engine_failed"))
            error = self.refused(anthropic.ServiceUnavailableError, dead.messages.create, **fields)
            self.assertIsInstance(error, anthropic.InternalServerError)
            self.assertEqual((error.status_code, error.type), (503, "api_error"))


class Overload(shared.Overload, Case):
    pass


class Leaving(shared.Leaving, Case):
    pass


class Async(shared.OtherClient, Case):
    pass

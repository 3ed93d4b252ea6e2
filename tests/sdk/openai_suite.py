"""The official `openai` package against the real server. Answers are validated against the package's own types, strictly."""

import time

import openai
from openai import AsyncOpenAI, OpenAI

import shared
from support import MODEL, PATIENCE, STORY, USER, Suite


def client(server, kind=OpenAI, strict=True, **options):
    options = {"max_retries": 0, "timeout": PATIENCE, "api_key": server.key or "none"} | options
    return kind(base_url=server.url + "/v1", _strict_response_validation=strict, **options)


class Case(shared.Speaks, Suite):
    package, Async, Overloaded = openai, AsyncOpenAI, openai.RateLimitError

    def connect(self, server, kind=OpenAI, **options):
        return client(server, kind, **options)

    def calls(self, client):
        return client.chat.completions

    def sampling(self, **fields):
        return fields

    def check_full(self, error):
        self.assertEqual((error.status_code, error.code, error.type), (429, "queue_full", "rate_limit_error"))

    def text_of(self, answer):
        return answer.choices[0].message.content

    def tokens_of(self, answer):
        return answer.usage.completion_tokens

    def piece_of(self, event):
        return event.choices[0].delta.content or ""

    def setUp(self):
        super().setUp()
        self.client = client(self.open)
        self.lenient = client(self.open, strict=False)
        self.addCleanup(self.client.close)
        self.addCleanup(self.lenient.close)

    def chat(self, **fields):
        fields = {"model": MODEL, "messages": USER, "temperature": 0, "max_tokens": 24} | fields
        return self.client.chat.completions.create(**fields)

    def complete(self, **fields):
        """A completion. Streams are not validated strictly: the package has one type for both deliveries, and its finish_reason
        is never null, which it is in every chunk but the last, at OpenAI too."""
        fields = {"model": MODEL, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 12} | fields
        if fields.get("stream"):
            return self.lenient.completions.create(**fields)
        return self.client.completions.create(**fields)


class Models(Case):
    def test_the_list_holds_the_one_model_that_is_served(self):
        models = list(self.client.models.list())
        self.assertEqual([(m.id, m.object, m.owned_by) for m in models], [(MODEL, "model", "crucible")])

    def test_a_model_can_be_asked_for_by_its_id(self):
        model = self.client.models.retrieve(MODEL)
        self.assertEqual(model, self.client.models.list().data[0])
        self.assertLess(abs(model.created - time.time()), 3600)

    def test_another_model_is_not_found(self):
        with self.assertRaises(openai.NotFoundError) as caught:
            self.client.models.retrieve("gpt-4o")
        self.assertEqual((caught.exception.code, caught.exception.param), ("model_not_found", "model"))


class Chat(shared.Text, Case):
    def test_a_whole_answer_has_every_field(self):
        answer = self.chat()
        self.assertRegex(answer.id, r"^chatcmpl-\w+$")
        self.assertEqual((answer.object, answer.model), ("chat.completion", MODEL))
        self.assertLess(abs(answer.created - time.time()), 3600)
        [choice] = answer.choices
        self.assertEqual((choice.index, choice.finish_reason, choice.message.role), (0, "stop", "assistant"))
        self.assertIn("Paris", choice.message.content)
        self.assertEqual((choice.logprobs, choice.message.refusal, choice.message.tool_calls), (None, None, None))

    def test_a_stream_is_the_whole_answer_in_pieces(self):
        whole = self.chat()
        chunks = list(self.chat(stream=True))
        self.assertEqual({(c.id, c.created, c.model, c.object) for c in chunks},
                         {(chunks[0].id, chunks[0].created, MODEL, "chat.completion.chunk")})
        self.assertEqual((chunks[0].choices[0].delta.role, chunks[0].choices[0].delta.content), ("assistant", ""))
        self.assertTrue(all(c.choices[0].delta.role is None for c in chunks[1:]))
        text = "".join(c.choices[0].delta.content or "" for c in chunks)
        self.assertEqual(text, whole.choices[0].message.content)
        reasons = [c.choices[0].finish_reason for c in chunks]
        self.assertEqual(reasons, [None] * (len(chunks) - 1) + ["stop"])
        self.assertTrue(all(c.usage is None for c in chunks), "no usage unasked")
        self.assertGreater(len(chunks), 5, "in pieces")

    def test_the_streaming_helper_of_the_package_builds_the_same_answer(self):
        whole = self.chat()
        with self.client.chat.completions.stream(model=MODEL, messages=USER, temperature=0, max_tokens=24) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_completion()
        self.assertEqual(final.choices[0].message.content, whole.choices[0].message.content)
        self.assertEqual(final.choices[0].finish_reason, "stop")
        self.assertIn("content.delta", kinds)
        self.assertEqual(kinds[-1], "content.done")

    def test_usage_counts_the_tokens_of_the_template_and_of_the_answer(self):
        usage = self.chat(max_tokens=7, messages=[{"role": "user", "content": STORY}]).usage
        prompt = len(self.open.tokenize(messages=[{"role": "user", "content": STORY}]))
        self.assertEqual((usage.prompt_tokens, usage.completion_tokens, usage.total_tokens), (prompt, 7, prompt + 7))

    def test_usage_of_a_stream_comes_last_and_only_when_asked_for(self):
        whole = self.chat()
        chunks = list(self.chat(stream=True, stream_options={"include_usage": True}))
        self.assertEqual((chunks[-1].choices, chunks[-1].usage), ([], whole.usage))
        self.assertTrue(all(c.usage is None and len(c.choices) == 1 for c in chunks[:-1]))

    def test_a_stop_string_ends_the_answer_before_itself(self):
        text = self.chat().choices[0].message.content
        cut = text.index("Paris")
        for stop in ("Paris", ["never there", "Paris"], ["aris", "Paris"]):
            answer = self.chat(stop=stop).choices[0]
            self.assertEqual((answer.message.content, answer.finish_reason), (text[:cut], "stop"), stop)
        chunks = list(self.chat(stop="Paris", stream=True))
        self.assertEqual("".join(c.choices[0].delta.content or "" for c in chunks), text[:cut], "nothing of it leaks")

    def test_the_length_ends_an_answer(self):
        answer = self.chat(max_tokens=3)
        self.assertEqual((answer.choices[0].finish_reason, answer.usage.completion_tokens), ("length", 3))
        answer = self.chat(max_tokens=openai.omit, max_completion_tokens=4)
        self.assertEqual((answer.choices[0].finish_reason, answer.usage.completion_tokens), ("length", 4))

    def test_logprobs_name_every_token_and_their_bytes_are_the_text(self):
        whole = self.chat(max_tokens=6, logprobs=True, top_logprobs=3)
        content = whole.choices[0].logprobs.content
        self.assertEqual(len(content), 6)
        self.assertEqual(bytes(b for t in content for b in t.bytes).decode(), whole.choices[0].message.content)
        self.assertEqual("".join(t.token for t in content), whole.choices[0].message.content)
        for token in content:
            self.assertLessEqual(token.logprob, 0)
            self.assertEqual(len(token.top_logprobs), 3)
            self.assertEqual((token.top_logprobs[0].token, token.top_logprobs[0].logprob), (token.token, token.logprob))
            values = [t.logprob for t in token.top_logprobs]
            self.assertEqual(values, sorted(values, reverse=True))
        self.assertIsNone(whole.choices[0].logprobs.refusal)

    def test_logprobs_of_a_stream_are_those_of_the_whole_answer_to_the_bit(self):
        whole = self.chat(max_tokens=8, logprobs=True, top_logprobs=2).choices[0].logprobs.content
        chunks = self.chat(max_tokens=8, logprobs=True, top_logprobs=2, stream=True)
        parts = [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
        self.assertEqual([(t.token, t.logprob) for t in parts], [(t.token, t.logprob) for t in whole])
        self.assertEqual([[a.logprob for a in t.top_logprobs] for t in parts],
                         [[a.logprob for a in t.top_logprobs] for t in whole])

    def test_logprobs_without_alternatives_have_none(self):
        content = self.chat(max_tokens=2, logprobs=True).choices[0].logprobs.content
        self.assertEqual([t.top_logprobs for t in content], [[], []])

    def test_a_seed_repeats_an_answer_and_its_fingerprint_says_of_what(self):
        story = [{"role": "user", "content": STORY}]
        one, two, other = (self.chat(messages=story, temperature=1, seed=seed) for seed in (7, 7, 8))
        self.assertEqual(one.choices[0].message.content, two.choices[0].message.content)
        self.assertNotEqual(one.choices[0].message.content, other.choices[0].message.content)
        self.assertEqual(one.system_fingerprint, other.system_fingerprint)
        self.assertRegex(one.system_fingerprint, "^crucible-")

    def test_without_a_seed_two_answers_differ(self):
        story = [{"role": "user", "content": STORY}]
        texts = {self.chat(messages=story, temperature=1, max_tokens=32).choices[0].message.content for _ in range(2)}
        self.assertEqual(len(texts), 2)

    def test_several_choices_have_random_streams_of_their_own_by_a_fixed_rule(self):
        fields = dict(messages=[{"role": "user", "content": STORY}], temperature=1, seed=11)
        three = self.chat(n=3, **fields)
        texts = [c.message.content for c in three.choices]
        self.assertEqual([c.index for c in three.choices], [0, 1, 2])
        self.assertEqual(len(set(texts)), 3)
        self.assertEqual(self.chat(**fields).choices[0].message.content, texts[0], "the first is the only one of n = 1")
        parts = ["", "", ""]
        for chunk in self.chat(n=3, stream=True, **fields):
            parts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        self.assertEqual(parts, texts)
        self.assertEqual(three.usage.completion_tokens, 3 * 24)

    def test_a_bias_bans_a_token_or_makes_it_certain(self):
        text = self.chat().choices[0].message.content
        [paris] = self.open.tokenize(text=" Paris", special_tokens=False)
        without = self.chat(logit_bias={str(paris): -100}).choices[0].message.content
        self.assertTrue(text.startswith(without[: text.index(" Paris")]), "the same up to the banned token")
        self.assertNotEqual(without[: len(text)], text)
        self.assertNotIn(" Paris", without)
        only = self.complete(logit_bias={str(paris): 100}, max_tokens=4, extra_body={"ignore_eos": True})
        self.assertEqual(only.choices[0].text, " Paris" * 4)
        drawn = self.complete(logit_bias={str(paris): 100}, max_tokens=4, temperature=1, seed=1)
        self.assertEqual(drawn.choices[0].text, " Paris" * 4)

    def test_penalties_drive_away_what_was_said(self):
        fields = dict(prompt="one two one two one two one two", max_tokens=32, extra_body={"ignore_eos": True}, logprobs=0)
        plain = self.complete(**fields).choices[0]
        distinct = lambda choice: len(set(choice.logprobs.tokens))
        for name in ("presence_penalty", "frequency_penalty"):
            punished = self.complete(**fields, **{name: 2}).choices[0]
            self.assertGreater(distinct(punished), distinct(plain), name)
            rewarded = self.complete(**fields, **{name: -2}).choices[0]
            self.assertLessEqual(distinct(rewarded), distinct(plain), name)
            chunks = self.complete(**fields, **{name: 2}, stream=True)
            self.assertEqual("".join(c.choices[0].text for c in chunks), punished.text, name)

    def test_roles_and_text_parts_are_one_conversation(self):
        system = {"role": "system", "content": "You are a pirate."}
        plain = self.chat(messages=[system, {"role": "user", "content": "Who are you?"}])
        parts = [{"type": "text", "text": "Who "}, {"type": "text", "text": "are you?"}]
        same = self.chat(messages=[system | {"role": "developer"}, {"role": "user", "content": parts}])
        self.assertEqual(plain.choices[0].message.content, same.choices[0].message.content)
        self.assertEqual(plain.usage, same.usage)

    def test_an_answer_goes_back_in_as_a_turn(self):
        first = self.chat()
        turn = first.choices[0].message.to_dict()
        second = self.chat(messages=[*USER, turn, {"role": "user", "content": "And of Italy?"}])
        self.assertIn("Rome", second.choices[0].message.content)
        self.assertGreater(second.usage.prompt_tokens, first.usage.prompt_tokens)

    def test_values_without_effect_pass(self):
        plain = self.chat()
        same = self.chat(frequency_penalty=0, presence_penalty=0, logit_bias={}, n=1, tools=[], tool_choice="none",
                         response_format={"type": "text"}, store=False, user="me", modalities=["text"], metadata={},
                         service_tier="auto", parallel_tool_calls=True)
        self.assertEqual(same.choices[0].message.content, plain.choices[0].message.content)

    def test_a_raw_response_carries_the_request_id(self):
        raw = self.client.chat.completions.with_raw_response.create(model=MODEL, messages=USER, max_tokens=2)
        answer = raw.parse()
        self.assertEqual((raw.headers["x-request-id"], answer._request_id), (answer.id, answer.id))
        self.assertEqual(raw.headers["content-type"], "application/json")


class Completions(Case):
    def test_a_whole_answer_has_every_field(self):
        answer = self.complete()
        self.assertRegex(answer.id, r"^cmpl-\w+$")
        self.assertEqual((answer.object, answer.model), ("text_completion", MODEL))
        self.assertEqual((answer.choices[0].index, answer.choices[0].logprobs), (0, None))
        prompt = len(self.open.tokenize(text="The capital of France is"))
        self.assertEqual((answer.usage.prompt_tokens, answer.usage.completion_tokens), (prompt, 12))
        self.assertIn("Paris", answer.choices[0].text)

    def test_a_stream_is_the_whole_answer_in_pieces(self):
        whole = self.complete()
        chunks = list(self.complete(stream=True, stream_options={"include_usage": True}))
        self.assertEqual("".join(c.choices[0].text for c in chunks[:-1]), whole.choices[0].text)
        self.assertEqual((chunks[-1].choices, chunks[-1].usage), ([], whole.usage))
        self.assertEqual(len({(c.id, c.created) for c in chunks}), 1)
        reasons = [c.choices[0].finish_reason for c in chunks[:-1]]
        self.assertEqual(reasons, [None] * (len(reasons) - 1) + ["length"])

    def test_sixteen_tokens_when_no_number_is_named(self):
        self.assertEqual(self.complete(max_tokens=openai.omit).usage.completion_tokens, 16)

    def test_text_and_token_ids_are_the_same_prompt_alone_and_in_arrays(self):
        prompts = ["The capital of France is", "Once upon a time"]
        ids = [self.open.tokenize(text=text) for text in prompts]
        alone = [self.complete(prompt=text).choices[0].text for text in prompts]
        self.assertEqual([self.complete(prompt=i).choices[0].text for i in ids], alone)
        for prompt in (prompts, ids):
            answer = self.complete(prompt=prompt, n=2, best_of=2)
            self.assertEqual([c.text for c in answer.choices], [alone[0]] * 2 + [alone[1]] * 2)
            self.assertEqual([c.index for c in answer.choices], [0, 1, 2, 3])
            self.assertEqual(answer.usage.prompt_tokens, sum(map(len, ids)), "each prompt once")

    def test_echo_puts_the_prompt_before_the_answer(self):
        plain = self.complete().choices[0].text
        self.assertEqual(self.complete(echo=True).choices[0].text, "The capital of France is" + plain)
        chunks = self.complete(echo=True, stream=True)
        self.assertEqual("".join(c.choices[0].text for c in chunks), "The capital of France is" + plain)

    def score(self, **fields):
        """A completion after its scored prompt. Not validated strictly: the first token of a prompt has no score, which the package's
        type does not say."""
        return self.lenient.completions.create(**{"model": MODEL, "temperature": 0, "echo": True, "logprobs": 2} | fields)

    def test_echo_with_logprobs_scores_every_token_of_the_prompt_but_the_first(self):
        ids = self.open.tokenize(text="The capital of France is")
        [choice] = self.score(prompt="The capital of France is", max_tokens=3).choices
        lists, count = choice.logprobs, len(ids) + 3
        self.assertEqual("".join(lists.tokens), choice.text)
        self.assertEqual([len(part) for part in (lists.tokens, lists.token_logprobs, lists.top_logprobs, lists.text_offset)], [count] * 4)
        self.assertEqual(lists.text_offset, [len("".join(lists.tokens[:i])) for i in range(count)])
        self.assertEqual((lists.token_logprobs[0], lists.top_logprobs[0]), (None, None))
        for token, value, top in list(zip(lists.tokens, lists.token_logprobs, lists.top_logprobs))[1:]:
            self.assertLessEqual(value, 0)
            self.assertEqual(top[token], value)
            self.assertIn(len(top), (2, 3), "two alternatives, and the token where it is none of them")

    def test_the_scores_of_an_answer_as_a_prompt_are_those_it_was_given_with(self):
        ids = self.open.tokenize(text="The capital of France is")
        answer = self.open.native(prompt_tokens=ids, max_tokens=8, logprobs=0)
        [choice] = self.score(prompt=ids + answer["token_ids"], max_tokens=1).choices
        given = [token["logprob"] for token in answer["logprobs"]]
        self.assertEqual(choice.logprobs.token_logprobs[len(ids):-1], given, "to the bit")

    def test_a_stream_of_scored_prompts_says_the_same_lists_as_the_whole_answer(self):
        prompts = ["The capital of France is", "Once upon a time"]
        whole = self.score(prompt=prompts, n=2, max_tokens=3)
        self.assertEqual([c.index for c in whole.choices], [0, 1, 2, 3])
        alone = [self.score(prompt=prompt, max_tokens=3).choices[0] for prompt in prompts]
        self.assertEqual([c.logprobs for c in whole.choices], [alone[at].logprobs for at in (0, 0, 1, 1)])
        lists = [{"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []} for _ in range(4)]
        for chunk in self.score(prompt=prompts, n=2, max_tokens=3, stream=True):
            [choice] = chunk.choices
            for name, part in lists[choice.index].items():
                part.extend(getattr(choice.logprobs, name, None) or [])
        self.assertEqual(lists, [c.logprobs.to_dict() for c in whole.choices])

    def test_choices_of_several_prompts_draw_by_the_seed_as_each_prompt_does_alone(self):
        prompts = ["Once upon a time", "My favourite colour is"]
        fields = dict(temperature=1, seed=13, max_tokens=10)
        alone = [[c.text for c in self.complete(prompt=prompt, n=3, **fields).choices] for prompt in prompts]
        self.assertEqual([len(set(texts)) for texts in alone], [3, 3], "each choice has a random stream of its own")
        self.assertEqual([c.text for c in self.complete(prompt=prompts, n=3, **fields).choices], alone[0] + alone[1])
        ids = [self.open.tokenize(text=prompt) for prompt in prompts]
        self.assertEqual([c.text for c in self.complete(prompt=ids, n=3, **fields).choices], alone[0] + alone[1])
        self.assertEqual([self.complete(prompt=prompt, **fields).choices[0].text for prompt in prompts],
                         [texts[0] for texts in alone], "the first is the only one of n = 1")

    def test_every_64_bit_integer_is_a_seed(self):
        draw = lambda seed: self.complete(prompt=STORY, temperature=1, seed=seed).choices[0].text
        seeds = (-1, 0, -(2**63), 2**63 - 1)
        self.assertEqual(len({draw(seed) for seed in seeds}), 4)
        self.assertEqual(draw(-1), draw(2**64 - 1), "a negative one is taken by its bits")
        for beyond in (2**64, -(2**63) - 1):
            with self.assertRaises(openai.BadRequestError) as caught:
                draw(beyond)
            self.assertEqual(caught.exception.param, "seed")

    def test_a_bias_and_a_penalty_hold_for_every_choice_of_every_prompt(self):
        [paris, rome] = [self.open.tokenize(text=text, special_tokens=False)[0] for text in (" Paris", " Rome")]
        prompts, bias = ["The capital is", "We live in"], {str(paris): 100, str(rome): 100}
        drawn = self.complete(prompt=prompts, n=2, max_tokens=4, temperature=1, seed=3, logit_bias=bias).choices
        self.assertEqual([set(c.text.split()) - {"Paris", "Rome"} for c in drawn], [set()] * 4)
        fields = dict(max_tokens=16, frequency_penalty=2, presence_penalty=1)
        alone = [self.complete(prompt=prompt, **fields).choices[0].text for prompt in prompts]
        together = [c.text for c in self.complete(prompt=prompts, n=2, **fields).choices]
        self.assertEqual(together, [alone[0]] * 2 + [alone[1]] * 2)

    def test_a_stop_string_ends_the_answer_before_itself(self):
        text = self.complete().choices[0].text
        choice = self.complete(stop=[" Paris", "nowhere"]).choices[0]
        self.assertEqual((choice.text, choice.finish_reason), (text[: text.index(" Paris")], "stop"))

    def test_logprobs_are_four_parallel_lists(self):
        answer = self.complete(logprobs=2, max_tokens=5).choices[0]
        lists = answer.logprobs
        self.assertEqual("".join(lists.tokens), answer.text)
        self.assertEqual([len(part) for part in (lists.tokens, lists.token_logprobs, lists.top_logprobs, lists.text_offset)], [5] * 4)
        self.assertEqual(lists.text_offset, [len("".join(lists.tokens[:i])) for i in range(5)])
        for token, value, top in zip(lists.tokens, lists.token_logprobs, lists.top_logprobs):
            self.assertEqual((len(top), top[token]), (2, value))
            self.assertEqual(max(top.values()), value, "greedy takes the likeliest")


class Errors(shared.Refusals, Case):
    def test_wrong_values_are_bad_requests_that_name_the_field(self):
        for field, value in [("temperature", 3), ("top_p", 1.5), ("presence_penalty", 2.1), ("frequency_penalty", -2.1),
                             ("logit_bias", {"7": 101}), ("logit_bias", {"x": 1}), ("max_tokens", 0), ("n", 0), ("n", 129), ("stop", [""]),
                             ("stop", list("abcde")), ("top_logprobs", 3), ("messages", []), ("stream", "yes"),
                             ("seed", "x"), ("stream_options", {"include_usage": True})]:
            error = self.refused(openai.BadRequestError, self.chat, **{field: value})
            self.assertEqual((error.status_code, error.param, error.type), (400, field, "invalid_request_error"), field)
            self.assertEqual(error.code, "invalid_value", field)
            self.assertIn(field, error.message)

    def test_what_is_not_served_is_refused_by_name(self):
        tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
        for field, value in [("tools", [tool]), ("response_format", {"type": "json_object"}), ("reasoning_effort", "low"),
                             ("audio", {"format": "wav", "voice": "a"}), ("modalities", ["text", "audio"]),
                             ("web_search_options", {}), ("prediction", {"type": "content", "content": "x"}),
                             ("store", True), ("service_tier", "priority"), ("functions", [tool["function"]])]:
            error = self.refused(openai.BadRequestError, self.chat, **{field: value})
            self.assertEqual((error.param, error.code), (field, "unsupported_parameter"))
        error = self.refused(openai.BadRequestError, self.complete, suffix="x")
        self.assertEqual((error.param, error.code), ("suffix", "unsupported_parameter"))

    def test_an_image_is_refused_where_it_stands(self):
        image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
        error = self.refused(openai.BadRequestError, self.chat, messages=[{"role": "user", "content": image}])
        self.assertEqual((error.param, error.code), ("messages[0].content[0].type", "unsupported_parameter"))

    def test_an_unknown_field_is_refused_and_not_ignored(self):
        error = self.refused(openai.BadRequestError, self.chat, extra_body={"temprature": 1})
        self.assertEqual((error.param, error.code), ("temprature", "unknown_parameter"))

    def test_a_conversation_over_the_context_says_so(self):
        error = self.refused(openai.BadRequestError, self.chat, messages=[{"role": "user", "content": "word " * 20_000}])
        self.assertEqual(error.code, "context_length_exceeded")
        error = self.refused(openai.BadRequestError, self.complete, max_tokens=1_000_000)
        self.assertEqual(error.param, "max_tokens")

    def test_another_model_is_not_found(self):
        for call in (self.chat, self.complete):
            error = self.refused(openai.NotFoundError, call, model="gpt-4o")
            self.assertEqual((error.code, error.param), ("model_not_found", "model"))

    def test_an_endpoint_that_does_not_exist_is_not_found(self):
        error = self.refused(openai.NotFoundError, self.client.embeddings.create, model=MODEL, input="x")
        self.assertEqual(error.code, "not_found")

    def test_a_body_over_the_limit_is_refused_with_its_status(self):
        with client(self.tight) as small:
            fields = dict(model=MODEL, messages=[{"role": "user", "content": "x" * 20_000}])
            error = self.refused(openai.APIStatusError, small.chat.completions.create, **fields)
        self.assertEqual((error.status_code, error.code), (413, "payload_too_large"))

    def test_a_wrong_or_missing_key_is_an_authentication_error(self):
        fields = dict(model=MODEL, messages=USER, max_tokens=1)
        with client(self.keyed) as right:
            self.assertEqual(right.chat.completions.create(**fields).usage.completion_tokens, 1)
            self.assertEqual(len(right.models.list().data), 1)
        with client(self.keyed, api_key="wrong") as wrong:
            for call in (lambda: wrong.chat.completions.create(**fields), wrong.models.list):
                error = self.refused(openai.AuthenticationError, call)
                self.assertEqual((error.status_code, error.code), (401, "invalid_api_key"))
                self.assertNotIn("wrong", str(error.body).replace("missing or wrong", ""), "the key is not repeated")

    def test_z_a_dead_engine_is_an_internal_server_error_and_ends_a_stream_with_an_error(self):
        with client(self.doomed) as dead:
            fields = dict(model=MODEL, messages=[{"role": "user", "content": "word " * 2000}], max_tokens=8)
            with self.assertRaises(openai.APIError) as caught:
                list(dead.chat.completions.create(stream=True, **fields))
            self.assertEqual((caught.exception.code, caught.exception.type), ("engine_failed", "server_error"))
            error = self.refused(openai.InternalServerError, dead.chat.completions.create, **fields)
            self.assertEqual((error.status_code, error.code, error.type), (503, "engine_failed", "server_error"))


class Overload(shared.Overload, Case):
    pass


class Leaving(shared.Leaving, Case):
    pass


class Async(shared.OtherClient, Case):
    pass

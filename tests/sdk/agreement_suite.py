"""One prompt, two official packages and the native interface: the same tokens, so the same text, whole and streamed."""

import asyncio

from anthropic import Anthropic, AsyncAnthropic
from openai import AsyncOpenAI, OpenAI

from support import FRANCE, MODEL, PATIENCE, STORY, Suite

CONVERSATIONS = [
    [{"role": "user", "content": FRANCE}],
    [{"role": "user", "content": STORY}],
    [{"role": "user", "content": "你好，请用中文写一句话 🎉"}],
    [{"role": "user", "content": FRANCE}, {"role": "assistant", "content": "Paris."}, {"role": "user", "content": "And of Italy?"}],
]
COUNT = 20


class Agreement(Suite):
    def setUp(self):
        super().setUp()
        common = dict(api_key="none", max_retries=0, timeout=PATIENCE)
        self.openai = OpenAI(base_url=self.open.url + "/v1", **common)
        self.anthropic = Anthropic(base_url=self.open.url, **common)
        for client in (self.openai, self.anthropic):
            self.addCleanup(client.close)

    def by_openai(self, messages, **fields):
        answer = self.openai.chat.completions.create(model=MODEL, messages=messages, max_tokens=COUNT, **fields)
        return answer.choices[0].message.content, answer.usage.prompt_tokens, answer.usage.completion_tokens

    def by_anthropic(self, messages, system=None, **fields):
        fields = {"extra_body": fields} | ({"system": system} if system else {})
        answer = self.anthropic.messages.create(model=MODEL, messages=messages, max_tokens=COUNT, **fields)
        return answer.content[0].text, answer.usage.input_tokens, answer.usage.output_tokens

    def by_native(self, messages, **fields):
        answer = self.open.native(prompt_tokens=self.open.tokenize(messages=messages), max_tokens=COUNT, **fields)
        return answer["text"], answer["prompt_tokens"], answer["tokens_generated"]

    def test_greedy_answers_agree(self):
        for messages in CONVERSATIONS:
            self.assertEqual(self.by_openai(messages, temperature=0), self.by_anthropic(messages, temperature=0))
            self.assertEqual(self.by_openai(messages, temperature=0), self.by_native(messages))

    def test_sampled_answers_of_one_seed_agree(self):
        for seed, messages in enumerate(CONVERSATIONS):
            fields = dict(temperature=0.9, top_p=0.95, seed=seed)
            extra = {"extra_body": {"top_k": 40, "min_p": 0.02}}
            self.assertEqual(self.by_openai(messages, **fields, **extra),
                             self.by_anthropic(messages, **fields, top_k=40, min_p=0.02))
            self.assertEqual(self.by_openai(messages, **fields, **extra),
                             self.by_native(messages, **fields, top_k=40, min_p=0.02))

    def test_a_system_prompt_is_one_prompt_in_both(self):
        system = "You are a pirate."
        turns = [{"role": "system", "content": system}, *CONVERSATIONS[0]]
        expected = self.by_native(turns)
        self.assertEqual(self.by_openai(turns, temperature=0), expected)
        self.assertEqual(self.by_anthropic(CONVERSATIONS[0], system=system, temperature=0), expected)

    def test_the_raw_prompt_of_completions_is_the_native_prompt(self):
        answer = self.openai.completions.create(model=MODEL, prompt="The sky is", temperature=0, max_tokens=COUNT)
        native = self.open.native(prompt="The sky is", max_tokens=COUNT)
        self.assertEqual((answer.choices[0].text, answer.usage.prompt_tokens), (native["text"], native["prompt_tokens"]))

    def test_a_stop_string_cuts_both_at_the_same_place(self):
        messages = CONVERSATIONS[0]
        one = self.openai.chat.completions.create(model=MODEL, messages=messages, temperature=0, stop="Paris")
        two = self.anthropic.messages.create(model=MODEL, messages=messages, max_tokens=100, stop_sequences=["Paris"],
                                             extra_body={"temperature": 0})
        self.assertEqual(one.choices[0].message.content, two.content[0].text)
        self.assertEqual((one.choices[0].finish_reason, two.stop_reason), ("stop", "stop_sequence"))

    def test_streams_of_both_in_one_batch_say_what_each_says_alone(self):
        alone = [self.by_openai(messages, temperature=0)[0] for messages in CONVERSATIONS]

        async def run():
            common = dict(api_key="none", max_retries=0, timeout=PATIENCE)
            async with AsyncOpenAI(base_url=self.open.url + "/v1", **common) as one, \
                    AsyncAnthropic(base_url=self.open.url, **common) as two:
                async def by_openai(messages):
                    chunks = await one.chat.completions.create(model=MODEL, messages=messages, max_tokens=COUNT,
                                                               temperature=0, stream=True)
                    return "".join([c.choices[0].delta.content or "" async for c in chunks])

                async def by_anthropic(messages):
                    async with two.messages.stream(model=MODEL, messages=messages, max_tokens=COUNT,
                                                   extra_body={"temperature": 0}) as stream:
                        return "".join([piece async for piece in stream.text_stream])

                calls = [by(messages) for messages in CONVERSATIONS for by in (by_openai, by_anthropic)]
                return await asyncio.gather(*calls)

        texts = asyncio.run(run())
        self.assertEqual(texts[0::2], alone)
        self.assertEqual(texts[1::2], alone)
        self.open.settle()
        self.assertGreater(self.open.stats()["decode_batch_peak"], 1, "they shared steps")

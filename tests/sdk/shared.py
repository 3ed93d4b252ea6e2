"""Checks that hold for the official package of either dialect: overload, leaving, refusals, many streams. A suite mixes them into its
own case, which says how its package is spoken to (`Speaks`)."""

import asyncio

from support import LONG, MODEL, STORY, USER, meanwhile, until


class Speaks:
    """What a case says of its package."""

    # The module, its asynchronous client and its error for a full queue.
    package = Async = Overloaded = None

    def connect(self, server, kind=None, **options):
        """A client of a server; the blocking one where no kind is named."""
        raise NotImplementedError

    def calls(self, client):
        """The part of a client that has `create` for a conversation."""
        raise NotImplementedError

    def sampling(self, **fields):
        """Sampling fields as the package takes them."""
        raise NotImplementedError

    def check_full(self, error):
        """Asserts what the package makes of a full queue."""
        raise NotImplementedError

    def text_of(self, answer):
        raise NotImplementedError

    def tokens_of(self, answer):
        """Tokens of the answer, as its usage says."""
        raise NotImplementedError

    def piece_of(self, event):
        """The text in one event of a stream."""
        raise NotImplementedError

    async def streamed(self, client, **fields):
        """The text of a stream of the other client."""
        return "".join([self.piece_of(e) async for e in await self.calls(client).create(stream=True, **fields)])

    def fields(self, **fields):
        """A short greedy question, with these fields."""
        return {"model": MODEL, "messages": USER, "max_tokens": 24} | self.sampling(temperature=0) | fields

    def said(self, **fields):
        """The text of a whole answer."""
        return self.text_of(self.calls(self.client).create(**self.fields(**fields)))


class Text:
    def test_text_whose_characters_split_over_tokens_streams_as_it_answers(self):
        for prompt in ("你好，请用中文写一句话：", "Only emoji, please: 🎉🚀👩‍🚀"):
            messages = [{"role": "user", "content": prompt}]
            fields = dict(messages=messages, max_tokens=40, **self.sampling(temperature=1, seed=5))
            events = self.calls(self.client).create(stream=True, **self.fields(**fields))
            self.assertEqual("".join(map(self.piece_of, events)), self.said(**fields))


class Refusals:
    def refused(self, kind, call, **fields):
        with self.assertRaises(kind) as caught:
            call(**fields)
        self.assertIs(type(caught.exception), kind)
        return caught.exception

    def test_bad_requests_leave_nothing_behind(self):
        for _ in range(5):
            self.refused(self.package.BadRequestError, self.said, max_tokens=0)
        self.open.settle()
        self.assertEqual((self.gained("accepted_requests"), self.gained("failed_requests")), (0, 0))
        self.assertIn("Paris", self.said())

    def test_the_connection_is_used_again_after_a_refusal(self):
        for _ in range(3):
            self.refused(self.package.BadRequestError, self.said, max_tokens=0)
            self.assertIn("Paris", self.said())

    def test_no_server_is_a_connection_error(self):
        nobody = type(self.open)("http://127.0.0.1:9")
        with self.connect(nobody) as nowhere, self.assertRaises(self.package.APIConnectionError):
            nowhere.models.list()


class Overload:
    """The tight server computes one request and lets one wait."""

    def setUp(self):
        super().setUp()
        self.tight.settle()
        self.rejected = self.tight.stats()["rejected_requests"]

    def fill(self, patient):
        """One resident and one waiting; the streams."""
        streams = []
        for full in ("active_requests", "queued_requests"):
            streams.append(self.calls(patient).create(stream=True, **LONG))
            until(full, lambda: self.tight.stats()[full] == 1)
        return streams

    def test_a_full_queue_is_the_packages_own_error_and_says_when_to_come_back(self):
        with self.connect(self.tight) as patient:
            streams = self.fill(patient)
            with self.assertRaises(self.Overloaded) as caught:
                self.calls(patient).create(**self.fields(max_tokens=4))
            self.check_full(caught.exception)
            self.assertEqual(caught.exception.response.headers["retry-after"], "1")
            for stream in streams:
                stream.close()
        self.tight.settle()
        self.assertEqual(self.tight.stats()["rejected_requests"], self.rejected + 1)

    def test_the_packages_own_retries_are_served_once_there_is_room(self):
        async def run():
            with self.connect(self.tight) as patient:
                streams = self.fill(patient)
                async with self.connect(self.tight, self.Async, max_retries=8) as stubborn:
                    create = self.calls(stubborn).with_raw_response.create
                    task = asyncio.create_task(create(**self.fields(max_tokens=4)))
                    await meanwhile("a refusal", lambda: self.tight.stats()["rejected_requests"] > self.rejected, task)
                    for stream in streams:
                        stream.close()
                    raw = await task
                    # The packages do not agree on whether an asynchronous answer is parsed in a task of its own.
                    answer = raw.parse()
                    return raw.retries_taken, await answer if asyncio.iscoroutine(answer) else answer

        retries, answer = asyncio.run(run())
        self.assertGreaterEqual(retries, 1)
        self.assertEqual(self.tokens_of(answer), 4)


class Leaving:
    def test_a_time_out_is_the_packages_own_error_and_ends_the_work(self):
        with self.assertRaises(self.package.APITimeoutError):
            self.calls(self.client.with_options(timeout=5.0)).create(**LONG)
        self.assert_cancelled(1)

    def test_a_stream_that_is_closed_ends_the_work(self):
        stream = self.calls(self.client).create(stream=True, **LONG)
        for _, _ in zip(range(6), stream):
            pass
        stream.close()
        self.assert_cancelled(1)

    def test_a_task_that_is_cancelled_ends_the_work_whole_or_streamed(self):
        async def run():
            async with self.connect(self.open, self.Async) as leaving:
                async def read():
                    async for _ in await self.calls(leaving).create(stream=True, **LONG):
                        pass

                tasks = [asyncio.create_task(t) for t in (self.calls(leaving).create(**LONG), read())]
                await meanwhile("both are resident", lambda: self.open.stats()["active_requests"] == 2, *tasks)
                for task in tasks:
                    task.cancel()
                return await asyncio.gather(*tasks, return_exceptions=True)

        self.assertTrue(all(isinstance(o, asyncio.CancelledError) for o in asyncio.run(run())))
        self.assert_cancelled(2)


class OtherClient:
    """The asynchronous client."""

    def test_a_whole_answer_and_a_stream_are_those_of_the_other_client(self):
        expected = self.said()

        async def run():
            async with self.connect(self.open, self.Async) as other:
                whole = await self.calls(other).create(**self.fields())
                text = await self.streamed(other, **self.fields())
                models = [m.id async for m in other.models.list()]
                return self.text_of(whole), text, models

        self.assertEqual(asyncio.run(run()), (expected, expected, [MODEL]))

    def test_fifty_streams_at_once_each_say_what_they_say_alone(self):
        prompts = [[{"role": "user", "content": f"Say the number {i} in a sentence."}] for i in range(10)]
        alone = [self.said(messages=p, max_tokens=12) for p in prompts]
        self.assertGreater(len(set(alone)), 5)
        before = self.open.settle()

        async def run():
            async with self.connect(self.open, self.Async) as other:
                fields = (self.fields(messages=prompts[at % 10], max_tokens=12) for at in range(50))
                return await asyncio.gather(*(self.streamed(other, **f) for f in fields))

        self.assertEqual(asyncio.run(run()), [alone[at % 10] for at in range(50)])
        after = self.open.settle()
        self.assertEqual(after["completed_requests"] - before["completed_requests"], 50)
        self.assertGreater(after["decode_batch_peak"], 4, "they shared steps")
        self.assertEqual(after["failed_requests"] + after["rejected_requests"], 0)

//! Many requests at once, clients that leave, and a full queue.

use serde_json::{Value, json};

use crate::checks::Checks;
use crate::dialect::{
    SKY, STREAM, WHOLE, ask, at_rest, data, endless, gained, ids, number, refused, start, stats, text, tokens,
};
use crate::http_support::binary::Binary;
use crate::http_support::client::{get, post, send_json};
use crate::http_support::until;

/// Every check of this file.
pub fn all(checks: &mut Checks, server: &Binary) {
    many_at_once(checks, server);
    clients_that_leave(checks, server);
    a_full_queue(checks);
}

/// Requests of every kind that can stand beside each other.
fn mixture() -> Vec<Value> {
    let prompts = [SKY, "Once upon a time", "def fibonacci(n):", "你好", "1, 2, 3,", "Dear Sir or Madam,"];
    let kinds = [
        json!({"max_tokens": 12}),
        json!({"max_tokens": 17, "temperature": 0.8, "seed": 4, "top_k": 50}),
        json!({"max_tokens": 9, "temperature": 1.3, "top_p": 0.9, "min_p": 0.01, "logprobs": 4}),
    ];
    let with = |prompt: &str, kind: &Value| {
        let mut body = kind.clone();
        body["prompt"] = json!(prompt);
        body
    };
    prompts.iter().flat_map(|prompt| kinds.iter().map(|kind| with(prompt, kind))).collect()
}

fn many_at_once(checks: &mut Checks, server: &Binary) {
    let bodies = mixture();
    let alone: Vec<Value> = bodies.iter().map(|body| post(server.address, WHOLE, body).json()).collect();
    let before = at_rest(server);
    let anchor = endless(server);
    checks.check("eighteen different requests beside a stream say what each says alone, whole", || {
        let sent: Vec<_> = bodies.iter().map(|body| send_json(server.address, WHOLE, body)).collect();
        let together: Vec<Value> = sent.into_iter().map(|pending| pending.response().json()).collect();
        assert_eq!(together, alone);
    });
    checks.check("and streamed", || {
        let sent: Vec<_> = bodies.iter().map(|body| send_json(server.address, STREAM, body)).collect();
        for (pending, alone) in sent.into_iter().zip(&alone) {
            let events = data(&pending.response());
            assert_eq!((&json!(ids(&events)), &json!(text(&events))), (&alone["token_ids"], &alone["text"]));
        }
    });
    checks.check("sixteen times one prompt is one answer, whoever stands where", || {
        let sent: Vec<_> = (0..15).map(|_| send_json(server.address, WHOLE, &bodies[1])).collect();
        assert!(sent.into_iter().all(|pending| pending.response().json() == alone[1]));
    });
    checks.check("they shared decode steps: many more rows than steps, and more than one row in most", || {
        // The stream alone makes one row a step; everything else came on top of its steps.
        let now = stats(server);
        assert!(number(&now, "decode_batch_peak") >= 8, "{now}");
        let rows = |stats: &Value| {
            stats["average_batch_size"].as_f64().expect("a number") * number(stats, "decode_steps") as f64
        };
        let [steps] = gained(&before, &now, ["decode_steps"]);
        let shared = (rows(&now) - rows(&before)).round() as u64;
        assert!(shared > 2 * steps, "{shared} rows in {steps} steps");
    });
    checks.check("prompts shared prefill passes, within the budget", || {
        let now = stats(server);
        assert!(number(&now, "packed_prefill_batches") > 0);
        assert!(number(&now, "max_prefill_batch_tokens") <= 64);
    });
    drop(anchor);
    checks.check("the account says who came and how each ended, token by token", || {
        let after = at_rest(server);
        let fields = ["accepted_requests", "completed_requests", "cancelled_requests", "failed_requests"];
        assert_eq!(gained(&before, &after, fields), [52, 51, 1, 0]);
        // Two of three kinds sample, twice each; so do the fifteen; the stream is greedy.
        assert_eq!(gained(&before, &after, ["greedy_requests", "sampled_requests"]), [13, 39]);
        let count = |answer: &Value| number(answer, "tokens_generated");
        let whole: u64 = 2 * alone.iter().map(count).sum::<u64>() + 15 * count(&alone[1]);
        let [generated] = gained(&before, &after, ["aggregate_tokens_generated"]);
        assert!(generated >= whole + 3, "{generated} of {whole} and the stream");
        let prompts: u64 = 2 * alone.iter().map(|a| number(a, "prompt_tokens")).sum::<u64>()
            + 15 * number(&alone[1], "prompt_tokens")
            + tokens(server, "Once upon a time").as_array().expect("ids").len() as u64;
        assert_eq!(gained(&before, &after, ["prefill_tokens", "prefill_final_rows"]), [prompts, 52]);
    });
}

fn clients_that_leave(checks: &mut Checks, server: &Binary) {
    let long = json!({"prompt": "word ".repeat(3000), "max_tokens": 64});
    for path in [WHOLE, STREAM] {
        checks.check(&format!("a client that leaves {path} in the middle of its prompt is out"), || {
            let before = at_rest(server);
            let request = send_json(server.address, path, &long);
            until("prefill has begun", || {
                let now = stats(server);
                now["prefilling_requests"] == 1 && gained(&before, &now, ["prefill_tokens"]) > [0]
            });
            drop(request);
            let after = at_rest(server);
            assert_eq!(gained(&before, &after, ["cancelled_requests", "completed_requests"]), [1, 0]);
            let [computed] = gained(&before, &after, ["prefill_tokens"]);
            assert!(computed < 3000, "the rest of {computed} was not computed");
        });
    }
    let answer = json!({"prompt": SKY, "max_tokens": 4000, "ignore_eos": true});
    for path in [WHOLE, STREAM] {
        checks.check(
            &format!("a client that leaves {path} in the middle of its answer is out, once, with its pages"),
            || {
                let before = at_rest(server);
                let request = send_json(server.address, path, &answer);
                until("it decodes", || gained(&before, &stats(server), ["decode_steps"]) > [3]);
                assert!(number(&stats(server), "kv_pages_used") >= 4000 / 16);
                drop(request);
                let after = at_rest(server);
                assert_eq!(
                    gained(&before, &after, ["accepted_requests", "cancelled_requests", "completed_requests"]),
                    [1, 1, 0]
                );
                assert_eq!(after["kv_pages_free"], 1024);
            },
        );
    }
    checks.check("one of many leaves and the others do not notice", || {
        let alone = post(server.address, WHOLE, &ask(json!({"max_tokens": 40, "ignore_eos": true}))).json();
        let before = at_rest(server);
        let leaving = endless(server);
        let sent: Vec<_> = (0..4)
            .map(|_| send_json(server.address, WHOLE, &ask(json!({"max_tokens": 40, "ignore_eos": true}))))
            .collect();
        until("they are beside each other", || number(&stats(server), "active_requests") >= 4);
        drop(leaving);
        assert!(sent.into_iter().all(|pending| pending.response().json() == alone));
        let after = at_rest(server);
        assert_eq!(gained(&before, &after, ["cancelled_requests", "completed_requests"]), [1, 4]);
    });
}

fn a_full_queue(checks: &mut Checks) {
    let server = start(&["limits.max_batch=1", "limits.max_queue=1"]);
    let resident = endless(&server);
    let waiting = send_json(server.address, STREAM, &ask(json!({})));
    until("one waits", || stats(&server)["queued_requests"] == 1);
    checks.check("a full queue refuses at once and says when to come back", || {
        for path in [WHOLE, STREAM] {
            let response = post(server.address, path, &ask(json!({})));
            assert_eq!(response.header("retry-after"), Some("1"));
            refused(&response, 429, "queue_full", None);
        }
        let now = stats(&server);
        assert_eq!(
            (&now["rejected_requests"], &now["queue_peak"], &now["accepted_requests"]),
            (&json!(2), &json!(1), &json!(2))
        );
    });
    checks.check("looking is never refused", || {
        for path in ["/health", "/ready", "/stats", "/metrics", "/v1/models"] {
            assert_eq!(get(server.address, path).status, 200, "{path}");
        }
        assert_eq!(post(server.address, "/tokenize", &json!({"text": "x"})).status, 200);
    });
    checks.check("who waited is served as soon as there is room", || {
        drop(resident);
        let events = data(&waiting.response());
        assert_eq!(events.last().map(|(name, _)| name.as_str()), Some("done"));
        let after = at_rest(&server);
        assert_eq!((&after["completed_requests"], &after["cancelled_requests"]), (&json!(1), &json!(1)));
    });
    checks.check("a client that leaves the queue leaves it at once", || {
        let resident = endless(&server);
        let before = stats(&server);
        let waiting = send_json(server.address, WHOLE, &ask(json!({})));
        until("one waits", || stats(&server)["queued_requests"] == 1);
        drop(waiting);
        until("none waits", || stats(&server)["queued_requests"] == 0);
        let now = stats(&server);
        assert_eq!(gained(&before, &now, ["cancelled_requests"]), [1]);
        assert_eq!(now["active_requests"], 1, "the resident one goes on");
        drop(resident);
        at_rest(&server);
    });
}

// Server-sent events of a fetch response: yields {name, data} for each. Lines end in LF or CRLF; comments are passed over.

export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let name = "";
  let data = null;
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const ended of lines) {
      const line = ended.endsWith("\r") ? ended.slice(0, -1) : ended;
      if (line === "") {
        if (data !== null) yield { name: name || "message", data };
        name = "";
        data = null;
        continue;
      }
      const colon = line.indexOf(":");
      const field = colon < 0 ? line : line.slice(0, colon);
      const text = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
      if (field === "event") name = text;
      if (field === "data") data = data === null ? text : data + "\n" + text;
    }
  }
}

// What users of each npm library write, with nothing changed but the address; see programs.py.
//
//     node programs.mjs CLIENT URL MODEL URL MODEL URL MODEL    # reads, sees pictures, embeds
//
// Runs in a folder whose node_modules has the client. Prints a line for each task.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const QUESTION = "Where is the capital of China?";
const WEATHER = "What is the weather in Paris?";
const PERSON =
  "Text: Anna Smith is 31 years old.\nExtract the data into this JSON schema: " +
  '{"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, ' +
  '"required": ["name", "age"]}';
const ASKED = "What color is the star?";
const PICTURE = readFileSync(new URL("../../examples/shapes.png", import.meta.url));
const DATA = PICTURE.toString("base64");
const TEXTS = ["a red circle", "the capital of China", "a red circle"];
const KEY = "none";
const LIMIT = 200;
const CITY = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
};
const TASKS = ["chat", "stream", "tools", "structured", "picture", "embed"];

const require = createRequire(join(process.cwd(), "x.js"));
const load = async (name) => import(pathToFileURL(require.resolve(name)));

const saysBeijing = (text) => assert.match(text, /Beijing/);
const saysBlue = (text) => assert.match(text, /blue/);
const isStreamed = (pieces) => {
  assert(pieces.filter((piece) => piece).length > 1, JSON.stringify(pieces));
  saysBeijing(pieces.join(""));
};
const isAnna = (person) => assert.deepEqual(person, { name: "Anna Smith", age: 31 });
const callsWeather = (name, given) =>
  assert.deepEqual([name, given], ["get_weather", { city: "Paris" }]);
const areEmbeddings = ([first, other, again]) => {
  const most = (a, b) => Math.max(...a.map((value, place) => Math.abs(value - b[place])));
  assert(first.length === other.length && first.length > 1);
  assert(most(first, again) < 1e-4 && most(first, other) > 1e-3);
};

async function personSchema() {
  const { z } = await load("zod");
  return z.object({ name: z.string().max(20), age: z.number().int().min(0).max(150) });
}

async function openai(url, model) {
  const { default: OpenAI } = await load("openai");
  const { zodResponseFormat } = await load("openai/helpers/zod");
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: KEY });
  const ask = (content, more) =>
    client.chat.completions.create({
      model,
      temperature: 0,
      messages: [{ role: "user", content }],
      ...more,
    });
  return {
    chat: async () => saysBeijing((await ask(QUESTION)).choices[0].message.content),
    stream: async () => {
      const pieces = [];
      for await (const chunk of await ask(QUESTION, { stream: true }))
        pieces.push(chunk.choices[0]?.delta.content);
      isStreamed(pieces);
    },
    tools: async () => {
      const described = { name: "get_weather", description: "Get the weather of a city." };
      const tool = { type: "function", function: { ...described, parameters: CITY } };
      const [call] = (await ask(WEATHER, { tools: [tool] })).choices[0].message.tool_calls;
      callsWeather(call.function.name, JSON.parse(call.function.arguments));
    },
    structured: async () => {
      const answer = await client.chat.completions.parse({
        model,
        temperature: 0,
        messages: [{ role: "user", content: PERSON }],
        response_format: zodResponseFormat(await personSchema(), "person"),
      });
      isAnna(answer.choices[0].message.parsed);
    },
    picture: async () => {
      const url_ = `data:image/png;base64,${DATA}`;
      const parts = [
        { type: "image_url", image_url: { url: url_ } },
        { type: "text", text: ASKED },
      ];
      saysBlue((await ask(parts)).choices[0].message.content);
    },
    // The library asks for base64 and decodes it.
    embed: async () => {
      const answer = await client.embeddings.create({ model, input: TEXTS });
      areEmbeddings(answer.data.map((entry) => entry.embedding));
    },
  };
}

async function anthropic(url, model) {
  const { default: Anthropic } = await load("@anthropic-ai/sdk");
  const client = new Anthropic({ baseURL: url, apiKey: KEY });
  const body = (content, more) => ({
    model,
    max_tokens: LIMIT,
    temperature: 0,
    messages: [{ role: "user", content }],
    ...more,
  });
  const ask = (content, more) => client.messages.create(body(content, more));
  return {
    chat: async () => saysBeijing((await ask(QUESTION)).content[0].text),
    stream: async () => {
      const pieces = [];
      const stream = client.messages.stream(body(QUESTION));
      stream.on("text", (text) => pieces.push(text));
      await stream.finalMessage();
      isStreamed(pieces);
    },
    tools: async () => {
      const described = { name: "get_weather", description: "Get the weather of a city." };
      const { content } = await ask(WEATHER, { tools: [{ ...described, input_schema: CITY }] });
      const [call] = content.filter((block) => block.type === "tool_use");
      callsWeather(call.name, call.input);
    },
    structured: async () => {
      const { zodOutputFormat } = await load("@anthropic-ai/sdk/helpers/zod");
      const format = zodOutputFormat(await personSchema());
      isAnna((await client.messages.parse(body(PERSON, { output_config: { format } }))).parsed_output);
    },
    picture: async () => {
      const source = { type: "base64", media_type: "image/png", data: DATA };
      const parts = [
        { type: "image", source },
        { type: "text", text: ASKED },
      ];
      saysBlue((await ask(parts)).content[0].text);
    },
  };
}

// The `ai` package with either provider: `chat` and `embeddings` make its models.
async function ai(chat, seeing, embeddings) {
  const { generateText, streamText, embedMany, jsonSchema, tool, Output } = await load("ai");
  const fixed = { temperature: 0, maxOutputTokens: LIMIT, maxRetries: 0 };
  const ask = (prompt, more) => generateText({ model: chat, prompt, ...fixed, ...more });
  return {
    chat: async () => saysBeijing((await ask(QUESTION)).text),
    stream: async () => {
      const pieces = [];
      const { textStream } = streamText({ model: chat, prompt: QUESTION, ...fixed });
      for await (const piece of textStream) pieces.push(piece);
      isStreamed(pieces);
    },
    tools: async () => {
      const get_weather = tool({
        description: "Get the weather of a city.",
        inputSchema: jsonSchema(CITY),
      });
      const [call] = (await ask(WEATHER, { tools: { get_weather } })).toolCalls;
      callsWeather(call.toolName, call.input);
    },
    structured: async () => {
      const output = Output.object({ schema: await personSchema() });
      isAnna((await ask(PERSON, { output })).output);
    },
    picture: async () => {
      const content = [
        { type: "image", image: PICTURE },
        { type: "text", text: ASKED },
      ];
      const messages = [{ role: "user", content }];
      saysBlue((await generateText({ model: seeing, messages, ...fixed })).text);
    },
    embed: async () => {
      const { embeddings: found } = await embedMany({ model: embeddings, values: TEXTS });
      areEmbeddings(found);
    },
  };
}

async function aiOpenAI([url, model, seeing, seer, embedding, embedder]) {
  const { createOpenAI } = await load("@ai-sdk/openai");
  const at = (place) => createOpenAI({ baseURL: `${place}/v1`, apiKey: KEY });
  // What it calls by default is /v1/responses; chat completions it calls when they are named.
  const byDefault = await ai(at(url)(model), at(seeing)(seer), at(embedding).embedding(embedder));
  const byChat = await ai(at(url).chat(model), at(seeing).chat(seer), null);
  const both = (task) => async () => {
    await byDefault[task]();
    if (task !== "embed") await byChat[task]();
  };
  return Object.fromEntries(TASKS.map((task) => [task, both(task)]));
}

async function aiCompatible([url, model, seeing, seer, embedding, embedder]) {
  const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
  const at = (place) =>
    createOpenAICompatible({
      name: "fastdeploy",
      baseURL: `${place}/v1`,
      apiKey: KEY,
      supportsStructuredOutputs: true,
    });
  return ai(at(url)(model), at(seeing)(seer), at(embedding).embeddingModel(embedder));
}

// By place: the first model reads, the second sees, the third embeds.
const oneEach = (make) => async (places) => {
  const [reads, sees, embeds] = await Promise.all(
    [0, 2, 4].map((place) => make(places[place], places[place + 1])),
  );
  return { ...reads, picture: sees.picture, embed: embeds.embed };
};

const CLIENTS = {
  openai: oneEach(openai),
  "@anthropic-ai/sdk": oneEach(anthropic),
  "@ai-sdk/openai": aiOpenAI,
  "@ai-sdk/openai-compatible": aiCompatible,
};

const [name, ...places] = process.argv.slice(2);
const about = JSON.parse(readFileSync(join("node_modules", name, "package.json"), "utf-8"));
console.log(`version ${about.version}`);
const tasks = await CLIENTS[name](places);
for (const task of TASKS) {
  if (!tasks[task]) continue;
  try {
    await tasks[task]();
    console.log(`${task} ok`);
  } catch (error) {
    console.error(error);
    console.log(`${task} ${error.name}: ${String(error.message).split(/\s+/).join(" ").slice(0, 200)}`);
    process.exitCode = 1;
  }
}

// A client with the types that openapi-typescript makes of openapi.yaml: a fault of the description
// is an error of tsc. `node generated_client.js URL PROMPT` asks, and prints the answers as JSON.
import createClient from "openapi-fetch";
import type { components, paths } from "./schema.d.ts";

type Schemas = components["schemas"];
type Rows = Schemas["RoutedChatChoice"]["routed_experts"];

const [url, promptText] = process.argv.slice(2);
const prompt: number[] = JSON.parse(promptText);
const client = createClient<paths, "application/json">({
  baseUrl: url,
  headers: { Authorization: "Bearer secret" },
});
const withoutKey = createClient<paths, "application/json">({ baseUrl: url });
const options = {
  model: "tiny",
  temperature: 0,
  max_tokens: 4,
  return_routed_experts: true,
  return_token_ids: true,
};

function idsOf(array: Rows): number[] {
  if (array === undefined || typeof array === "string" || !("data" in array)) {
    throw new Error("rows do not have the form `object`");
  }
  const bytes = Uint8Array.from(Buffer.from(array.data, "base64"));
  const ids = [...new Int16Array(bytes.buffer)];
  const [numRows, numLayers, topK] = array.shape;
  if (ids.length !== numRows * numLayers * topK || array.dtype !== "int16") {
    throw new Error("the array does not have its shape");
  }
  return ids;
}

async function completion() {
  const { data } = await client.POST("/v1/completions", { body: { ...options, prompt } });
  const choice = data!.choices[0];
  return {
    prompt,
    prompt_ids: idsOf(data!.prompt_routed_experts as Rows), // one array, of one prompt
    ids: idsOf(choice.routed_experts),
    tokens: choice.token_ids,
  };
}

async function chat() {
  const messages: Schemas["RoutedChatRequest"]["messages"] = [{ role: "user", content: "Hi" }];
  const { data } = await client.POST("/v1/chat/completions", { body: { ...options, messages } });
  const choice = data!.choices[0];
  return {
    prompt: data!.prompt_token_ids,
    prompt_ids: idsOf(data!.prompt_routed_experts),
    ids: idsOf(choice.routed_experts),
    tokens: choice.token_ids,
    text: choice.message.content,
  };
}

async function stream() {
  const body = { ...options, prompt, stream: true };
  const { data } = await client.POST("/v1/completions", { body, parseAs: "stream" });
  const events = (await new Response(data).text()).trimEnd().split("\n\n");
  if (events.pop() !== "data: [DONE]") {
    throw new Error("the stream has no end");
  }
  let promptIds: number[] = [];
  const ids: number[] = [];
  const tokens: number[] = [];
  for (const event of events) {
    const chunk: Schemas["RoutedCompletionChunk"] = JSON.parse(event.slice("data: ".length));
    if (chunk.prompt_routed_experts !== undefined) {
      promptIds = idsOf(chunk.prompt_routed_experts);
    }
    const choice = chunk.choices[0];
    if (choice.routed_experts !== undefined) {
      ids.push(...idsOf(choice.routed_experts));
    }
    tokens.push(...(choice.token_ids ?? []));
  }
  return { prompt, prompt_ids: promptIds, ids, tokens };
}

async function errors() {
  const path = "/v1/completions";
  const late = { ...options, prompt, routed_experts_prompt_start: 99 };
  const invalid = await client.POST(path, { body: late });
  const unauthorized = await withoutKey.POST(path, { body: { ...options, prompt } });
  const unknown = await client.POST(path, { body: { ...options, prompt, model: "another" } });
  const first: Schemas["ErrorResponse"] | { error: string } = invalid.error!;
  return {
    400: typeof first.error === "string" ? null : first.error.param,
    401: unauthorized.error!.error,
    404: unknown.error!.error,
    statuses: [invalid, unauthorized, unknown].map(({ response }) => response.status),
  };
}

const answers = [await completion(), await chat(), await stream()];
console.log(JSON.stringify({ answers, errors: await errors() }));

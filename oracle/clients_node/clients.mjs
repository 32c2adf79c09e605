// Talks to `coli serve` with openai-node and the AI SDK; exit 1 if an answer is not right.
//
//   node clients.mjs DEMO_URL CALLER_URL SERVER_URL
//
// The first serves oracle/demo, the second a model that always calls look_up(code: "42"); the
// third is the first without what may be between. clients_more.py starts them.

import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateObject, generateText, jsonSchema, streamText, tool } from 'ai';
import OpenAI from 'openai';
import { zodResponseFormat } from 'openai/helpers/zod';
import { z } from 'zod';

const [demoUrl, callerUrl, serverUrl] = process.argv.slice(2);
const SEA = [{ role: 'user', content: 'What is the weather?' }];
const PLAIN = {
  model: 'demo', messages: SEA, temperature: 0, max_tokens: 24, enable_thinking: false,
};
const PARAMETERS = {
  type: 'object', properties: { code: { type: 'string', enum: ['42', '43'] } },
  required: ['code'], additionalProperties: false,
};
const TOOL = {
  type: 'function',
  function: { name: 'look_up', description: 'Looks up a code.', parameters: PARAMETERS },
};
const FORM = z.object({ mood: z.enum(['calm', 'wild']), deep: z.boolean() });

/** Whether a check holds, and the words of what it threw if it threw. */
async function check(name, holds) {
  let is = false, why = '';
  try {
    is = await holds();
  } catch (error) {
    why = `: ${error.message}`;
  }
  console.log(`${is ? 'ok  ' : 'FAIL'} ${name}${why}`);
  if (!is) process.exitCode = 1;
}

async function cancelled() {
  return (await (await fetch(`${serverUrl}/health`)).json()).scheduler.cancelled;
}

/** Whether the server gives up one more reply within ten seconds of what is done. */
async function cancels(action) {
  const before = await cancelled();
  await action();
  for (let i = 0; i < 500 && await cancelled() === before; i++) {
    await new Promise(resolve => setTimeout(resolve, 20));
  }
  return await cancelled() === before + 1;
}

async function openaiNode() {
  const client = new OpenAI({ baseURL: `${demoUrl}/v1`, apiKey: 'key' });
  const caller = new OpenAI({ baseURL: `${callerUrl}/v1`, apiKey: 'key' });
  const chat = client.chat.completions;
  const whole = await chat.create(PLAIN);
  const text = whole.choices[0].message.content;
  await check('openai-node: whole reply', () => text && whole.usage.completion_tokens === 24);
  await check('openai-node: streamed reply is the whole one', async () => {
    let said = '', tokens = 0;
    const options = { stream: true, stream_options: { include_usage: true } };
    for await (const { choices, usage } of await chat.create({ ...PLAIN, ...options })) {
      said += choices[0]?.delta.content ?? '';
      tokens = usage?.completion_tokens ?? tokens;
    }
    return said === text && tokens === 24;
  });
  await check('openai-node: the stream helper', async () => {
    const final = await chat.stream(PLAIN).finalChatCompletion();
    return final.choices[0].message.content === text;
  });
  const tools = { ...PLAIN, tools: [TOOL] };
  const isRight = ({ name, arguments: given }) => name === 'look_up' && given === '{"code":"42"}';
  await check('openai-node: tool call', async () => {
    const { message, finish_reason } = (await caller.chat.completions.create(tools)).choices[0];
    return isRight(message.tool_calls[0].function) && finish_reason === 'tool_calls';
  });
  await check('openai-node: streamed tool call', async () => {
    const final = await caller.chat.completions.stream(tools).finalChatCompletion();
    return isRight(final.choices[0].message.tool_calls[0].function);
  });
  await check('openai-node: a named tool', async () => {
    const choice = { type: 'function', function: { name: 'look_up' } };
    const answer = await chat.create({ ...tools, max_tokens: 64, tool_choice: choice });
    const { name, arguments: given } = answer.choices[0].message.tool_calls[0].function;
    return name === 'look_up' && ['42', '43'].includes(JSON.parse(given).code);
  });
  await check('openai-node: structured output', async () => {
    const response_format = zodResponseFormat(FORM, 'sea');
    const answer = await chat.parse({ ...PLAIN, max_tokens: 64, response_format });
    return FORM.safeParse(answer.choices[0].message.parsed).success;
  });
  await check('openai-node: an error has its code and field', async () => {
    const error = await chat.create({ ...PLAIN, n: 2 }).catch(error => error);
    return error instanceof OpenAI.BadRequestError && error.param === 'n';
  });
  await check('openai-node: abort stops the server', () => cancels(async () => {
    const stream = await chat.create({ ...PLAIN, max_tokens: 1900, stream: true });
    for await (const _ of stream) break;
    stream.controller.abort();
  }));
}

async function aiSdk() {
  const options = { name: 'colibri', supportsStructuredOutputs: true, includeUsage: true };
  const of = url => createOpenAICompatible({ ...options, baseURL: `${url}/v1` })('demo');
  const model = of(demoUrl);
  const providerOptions = { colibri: { enable_thinking: false } };
  const plain = { model, messages: SEA, temperature: 0, maxOutputTokens: 24, providerOptions };
  const whole = await generateText(plain);
  await check('AI SDK: whole reply', () => whole.text && whole.usage.outputTokens === 24);
  await check('AI SDK: streamed reply is the whole one', async () => {
    const { textStream, usage } = streamText(plain);
    let said = '';
    for await (const part of textStream) said += part;
    return said === whole.text && (await usage).outputTokens === 24;
  });
  await check('AI SDK: reasoning apart', async () => {
    const thinking = { ...plain, maxOutputTokens: 4, providerOptions: {} };
    const { reasoningText, text } = await generateText(thinking);
    return reasoningText && !text;
  });
  const look_up = tool({ description: 'Looks up a code.', inputSchema: jsonSchema(PARAMETERS) });
  await check('AI SDK: tool call', async () => {
    const call = { ...plain, model: of(callerUrl), tools: { look_up } };
    const { toolCalls } = await generateText(call);
    return toolCalls[0].toolName === 'look_up' && toolCalls[0].input.code === '42';
  });
  await check('AI SDK: streamed tool call', async () => {
    const { toolCalls } = streamText({ ...plain, model: of(callerUrl), tools: { look_up } });
    return (await toolCalls)[0].input.code === '42';
  });
  await check('AI SDK: a named tool', async () => {
    const toolChoice = { type: 'tool', toolName: 'look_up' };
    const forced = { ...plain, maxOutputTokens: 64, tools: { look_up }, toolChoice };
    const { toolCalls } = await generateText(forced);
    return ['42', '43'].includes(toolCalls[0].input.code);
  });
  await check('AI SDK: structured output', async () => {
    const { object } = await generateObject({ ...plain, maxOutputTokens: 64, schema: FORM });
    return FORM.safeParse(object).success;
  });
  await check('AI SDK: abort stops the server', () => cancels(async () => {
    const abort = new AbortController();
    const long = { ...plain, maxOutputTokens: 1900, abortSignal: abort.signal };
    for await (const _ of streamText(long).textStream) abort.abort();
  }));
}

await openaiNode();
await aiSdk();

// Real Node clients, each with its default settings: `clients.mjs NAME URL MODEL`.
import assert from 'node:assert/strict'
import { createOpenAI } from '@ai-sdk/openai'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { generateText, stepCountIs, streamText, tool } from 'ai'
import OpenAI from 'openai'
import { z } from 'zod'

const [name, url, model] = process.argv.slice(2)
const [baseURL, apiKey, prompt] = [`${url}/v1`, 'none', 'Count to five.']
// The demo model has learnt to call tools; this one it calls as asked.
const toolPrompt = 'What is the weather in Paris?'

async function openai () {
  const client = new OpenAI({ baseURL, apiKey })
  const messages = [{ role: 'user', content: prompt }]
  const said = await client.chat.completions.create({ model, messages, temperature: 0 })
  const text = said.choices[0].message.content
  assert.ok(text)
  let streamed = ''
  const stream = await client.chat.completions.create({ model, messages, temperature: 0, stream: true })
  for await (const chunk of stream) streamed += chunk.choices[0]?.delta.content ?? ''
  assert.equal(streamed, text)
  const response = await client.responses.create({ model, input: prompt, temperature: 0 })
  assert.equal(response.output_text, text)
}

async function aiSdk (chat) {
  assert.ok((await generateText({ model: chat, prompt })).text)
  let streamed = ''
  for await (const part of streamText({ model: chat, prompt }).textStream) streamed += part
  assert.ok(streamed)
  const cities = []
  const weather = tool({
    description: 'The weather.',
    inputSchema: z.object({ city: z.string() }),
    execute: ({ city }) => { cities.push(city); return { weather: 'rain' } }
  })
  const agent = { model: chat, prompt: toolPrompt, temperature: 0, tools: { get_weather: weather }, stopWhen: stepCountIs(3) }
  assert.match((await generateText(agent)).text, /rain/)
  assert.match(await streamText(agent).text, /rain/)
  assert.deepEqual(cities, ['Paris', 'Paris'])
}

await {
  openai,
  ai_sdk_openai: () => aiSdk(createOpenAI({ baseURL, apiKey })(model)),
  ai_sdk_compatible: () => aiSdk(createOpenAICompatible({ name: 'pdserve', baseURL, apiKey })(model))
}[name]()

// What both clients are asked for, and where.
import { z } from "zod";

export const baseURL = process.env.PAGEMESH_URL;
export const apiKey = process.env.PAGEMESH_KEY;
export const MODEL = "smollm2-135m-instruct";
export const CAPITAL = "What is the capital of France?";
export const STORY = "Tell a long story about a page table.";
export const WEATHER = "What is the weather in Paris?";
export const INVENT = "Invent a person.";
// For an answer of a form, which a small model may draw out with white space.
export const ROOM_TOKENS = 1500;
export const TOO_LONG = "word ".repeat(4000);
export const City = z.object({ city: z.string().max(20) });
export const Person = z.object({
  name: z.string().max(16),
  mood: z.enum(["glad", "sad"]),
  addresses: z
    .array(z.object({ street: z.string().max(16), number: z.int().min(1).max(999) }))
    .min(1)
    .max(2),
});

/** Resolves once the engine has no request; throws where it keeps one. */
export async function becomesIdle() {
  const unfinished = /^vllm:num_requests_(?:running|waiting)\{.*\} (\S+)$/gm;
  for (let tries = 0; tries < 200; tries++) {
    const metrics = await (await fetch(new URL("/metrics", baseURL))).text();
    const left = [...metrics.matchAll(unfinished)].reduce((sum, found) => sum + Number(found[1]), 0);
    if (left === 0) return;
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
  throw new Error("a request was kept");
}

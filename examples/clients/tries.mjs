// Runs what is tried with a client in JavaScript, as tries.py does for those in Python.

import { z } from "zod";

export const URL = process.argv[2] ?? "http://127.0.0.1:8000";
export const MODEL = "rapid-embedded";
export const KEY = "none"; // a server without keys takes any
export const QUESTION = "What is the harbor of Gake?";
export const PLACE = z.object({ place: z.enum(["harbour", "bridge"]) }).strict();
export const LIGHT = z.object({ colour: z.enum(["red", "green", "white"]), is_lit: z.boolean() });
export const TELLS = "Tells the state of the light at a place.";

export function lightOf({ place }) {
  return `The light of the ${place} is white.`;
}

export async function run(...tries) {
  for (const each of tries) {
    try {
      await each();
      console.log(`ok ${each.name}`);
    } catch (error) {
      process.exitCode = 1;
      console.log(`failed ${each.name}: ${error}`.slice(0, 300));
    }
  }
}

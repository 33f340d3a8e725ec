"""Tokenizers with the forms of calls and of thinking of some families, over bytes."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rapid.checkpoints.text import ChatText

# Cut down from the families' own templates to what concerns tools.
HERMES = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA = """{%- if tools %}<|im_start|>system
Respond with {"name": function name, "parameters": dictionary}.
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.tool_calls %}{%- if m.tool_calls | length != 1 %}{{ raise_exception("only single calls!") }}
{%- endif %}{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{
m.tool_calls[0].function.arguments | tojson }}}{% else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
MISTRAL = """{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}
{%- for m in messages %}{% if m.tool_calls %}[TOOL_CALLS] [{% for call in m.tool_calls %}{{
call.function | tojson }}{% if call.id | length != 9 %}{{ raise_exception("nine!") }}{% endif %}{%
endfor %}]</s>{% elif m.role == "tool" %}[TOOL_RESULTS]{{ m.tool_call_id }}: {{ m.content
}}{% else %}[INST]{{ m.content }}{% endif %}{% endfor %}"""
NEW_MISTRAL = MISTRAL.replace("[TOOL_CALLS] [", "[TOOL_CALLS]f[ARGS]").replace("]</s>", "</s>")
QWEN_CODER = HERMES.replace(
    """{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>""",
    """<function={{ call.function.name }}>
{% for name, value in call.function.arguments | items %}<parameter={{ name }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>""",
)
GLM = HERMES.replace(
    """<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>""",
    """<tool_call>{{ call.function.name }}
{% for name, value in call.function.arguments.items() %}<arg_key>{{ name }}</arg_key>
<arg_value>{{ value if value is string else value | tojson(ensure_ascii=False) }}</arg_value>
{% endfor %}</tool_call>""",
)
# Its calls are messages to a tool, one at a time, and what is thought is a message before them.
GPT_OSS = """{%- set last = namespace(name="") %}{%- if tools %}<|start|>developer<|message|>
namespace functions {
{% for tool in tools %}type {{ tool.function.name }} = {{ tool.function.parameters | tojson }}
{% endfor %}}<|end|>{% endif %}{%- for m in messages %}{%- if m.tool_calls %}
{%- if m.content and m.thinking %}{{ raise_exception("not both!") }}{% endif %}
{%- if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif
%}{%- set call = m.tool_calls[0].function %}{%- set last.name = call.name %}<|start|>assistant to={{
"functions." + call.name }}<|channel|>commentary json<|message|>{{
call.arguments | tojson }}<|call|>
{%- elif m.role == "tool" %}<|start|>{{
"functions." + last.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson
}}<|end|>
{%- elif m.role == "assistant" %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
# What thinking adds to the first: Qwen's, whose models open it, and DeepSeek's, whose prompts do.
QWEN = (
    HERMES.replace(
        "{{ m.content }}{% for call",
        "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
        "{{ m.content }}{% for call",
    )
    + "{% if add_generation_prompt and enable_thinking is false %}"
    + "<think>\n\n</think>\n\n{% endif %}"
)
DEEPSEEK = HERMES + "{% if add_generation_prompt %}<think>\n{% endif %}"
# What is spoken in several tokens: Granite's in words, gpt-oss's by its channels.
GRANITE = (
    HERMES + "{# Here is my thought process: #}{% if thinking %}"
    "Write 'Here is my thought process:' and 'Here is my response:'.{% endif %}"
)
HARMONY = HERMES.replace(
    "{{ m.content }}{% for call",
    "{% if m.reasoning_content %}<|channel|>analysis<|message|>{{ m.reasoning_content }}<|end|>"
    "<|start|>assistant{% endif %}<|channel|>final<|message|>{{ m.content }}{% for call",
)
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"

TEMPLATES = {
    "hermes": HERMES,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "new_mistral": NEW_MISTRAL,
    "qwen_coder": QWEN_CODER,
    "glm": GLM,
    "gpt_oss": GPT_OSS,
    "plain": PLAIN,
}
THINKING = {"qwen": QWEN, "deepseek": DEEPSEEK, "granite": GRANITE, "harmony": HARMONY}
_SPECIAL = ["<|im_start|>", "<|im_end|>", "</s>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"]


@cache
def text_of(family: str) -> ChatText:
    """The tokenizer of a family: bytes, special tokens, and `<tool_call>` as Qwen has it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={each: at for at, each in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(each, special=True) for each in _SPECIAL])
    backend.add_tokens([AddedToken(f"<{end}tool_call>", normalized=False) for end in ("", "/")])
    if family == "glm":
        tags = [f"<{end}{tag}>" for tag in ("arg_key", "arg_value") for end in ("", "/")]
        backend.add_tokens([AddedToken(each, normalized=False) for each in tags])
    if family in ("harmony", "gpt_oss"):
        words = ("start", "channel", "message", "end", "constrain", "call")
        names = [f"<|{each}|>" for each in words]
        backend.add_special_tokens([AddedToken(each, special=True) for each in names])
    if family in THINKING:
        backend.add_tokens([AddedToken(f"<{end}think>", normalized=False) for end in ("", "/")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|call|>" if family == "gpt_oss" else "<|im_end|>",
        chat_template=(TEMPLATES | THINKING)[family],
    )
    return ChatText(tokenizer, frozenset([tokenizer.eos_token_id]))

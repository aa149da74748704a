"""Chat templates by name, for files that bring none of their own (`--chat-template NAME`).

Each writes the layout that the models of its name were trained on, with system, user and assistant turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_CHATML: Final = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

_LLAMA_2: Final = """\
{%- set turns = messages -%}
{%- set system = '' -%}
{%- if messages and messages[0].role == 'system' -%}
{%- set system = '<<SYS>>\\n' + messages[0].content | trim + '\\n<</SYS>>\\n\\n' -%}
{%- set turns = messages[1:] -%}
{%- endif -%}
{%- for message in turns -%}
{%- if message.role == 'user' -%}
{{ bos_token + '[INST] ' + (system if loop.first else '') + message.content | trim + ' [/INST]' }}
{%- elif message.role == 'assistant' -%}
{{ ' ' + message.content | trim + ' ' + eos_token }}
{%- else -%}
{{ raise_exception('only a first system message, and user and assistant messages, have a place here') }}
{%- endif -%}
{%- endfor -%}
"""

_MISTRAL: Final = """\
{{- bos_token -}}
{%- set turns = messages -%}
{%- set system = '' -%}
{%- if messages and messages[0].role == 'system' -%}
{%- set system = messages[0].content + '\\n\\n' -%}
{%- set turns = messages[1:] -%}
{%- endif -%}
{%- for message in turns -%}
{%- if message.role == 'user' -%}
{{ '[INST] ' + (system if loop.last or (turns | length == 1) else '') + message.content + ' [/INST]' }}
{%- elif message.role == 'assistant' -%}
{{ ' ' + message.content + eos_token }}
{%- else -%}
{{ raise_exception('only a first system message, and user and assistant messages, have a place here') }}
{%- endif -%}
{%- endfor -%}
"""

_LLAMA_3: Final = """\
{{- bos_token -}}
{%- for message in messages -%}
{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif -%}
"""

_ZEPHYR: Final = """\
{%- for message in messages -%}
{{ '<|' + message.role + '|>\\n' + message.content + eos_token + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>\\n' }}{%- endif -%}
"""

_GEMMA: Final = """\
{{- bos_token -}}
{%- set turns = messages -%}
{%- set system = '' -%}
{%- if messages and messages[0].role == 'system' -%}
{%- set system = messages[0].content | trim + '\\n\\n' -%}
{%- set turns = messages[1:] -%}
{%- endif -%}
{%- for message in turns -%}
{%- set role = 'model' if message.role == 'assistant' else message.role -%}
{{ '<start_of_turn>' + role + '\\n' + (system if loop.first else '') + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""

_PHI_3: Final = """\
{%- for message in messages -%}
{{ '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>\\n' }}{%- endif -%}
"""

_GRANITE: Final = """\
{%- for message in messages -%}
{{ '<|start_of_role|>' + message.role + '<|end_of_role|>' + message.content + '<|end_of_text|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif -%}
"""

_VICUNA: Final = """\
{%- for message in messages -%}
{%- if message.role == 'system' -%}{{ message.content + '\\n\\n' }}
{%- elif message.role == 'user' -%}{{ 'USER: ' + message.content + '\\n' }}
{%- else -%}{{ 'ASSISTANT: ' + message.content + eos_token + '\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'ASSISTANT:' }}{%- endif -%}
"""

_ALPACA: Final = """\
{%- for message in messages -%}
{%- if message.role == 'system' -%}{{ message.content + '\\n\\n' }}
{%- elif message.role == 'user' -%}{{ '### Instruction:\\n' + message.content + '\\n\\n' }}
{%- else -%}{{ '### Response:\\n' + message.content + eos_token + '\\n\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '### Response:\\n' }}{%- endif -%}
"""

_COMMAND_R: Final = """\
{%- for message in messages -%}
{%- set role = {'assistant': 'CHATBOT'}.get(message.role, message.role | upper) -%}
{{ '<|START_OF_TURN_TOKEN|><|' + role + '_TOKEN|>' + message.content | trim + '<|END_OF_TURN_TOKEN|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{%- endif -%}
"""

BUILTIN_TEMPLATES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "alpaca": _ALPACA,
        "chatml": _CHATML,
        "command-r": _COMMAND_R,
        "gemma": _GEMMA,
        "granite": _GRANITE,
        "llama-2": _LLAMA_2,
        "llama-3": _LLAMA_3,
        "mistral": _MISTRAL,
        "phi-3": _PHI_3,
        "vicuna": _VICUNA,
        "zephyr": _ZEPHYR,
    }
)

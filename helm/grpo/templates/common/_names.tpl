{{/* Names, labels and images. */}}

{{- define "grpo.name" -}}
{{- if contains "grpo" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-grpo" (.Release.Name | trunc 35 | trimSuffix "-") }}{{ end -}}
{{- end }}

{{- define "grpo.runId" -}}
{{ .Values.run.id | default (printf "%s-%s" .Release.Namespace .Release.Name) }}
{{- end }}

{{/* Labels that select the pods of a component: (list . "run-api"). */}}
{{- define "grpo.selector" -}}
app.kubernetes.io/name: grpo
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* All labels of an object: (list . "run-api"). */}}
{{- define "grpo.labels" -}}
{{ include "grpo.selector" . }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: grpo-{{ (index . 0).Chart.Version }}
{{- end }}

{{/* Image of a component: (list . "run-api" override). Images that compute have a tag per device. */}}
{{- define "grpo.image" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- with index . 2 -}}
{{ . }}
{{- else -}}
{{- with $root.Values.image.registry }}{{ trimSuffix "/" . }}/{{ end -}}
grpo-{{ $component }}:{{ $root.Values.image.tag | default $root.Chart.AppVersion }}
{{- if has $component (list "vllm-server" "trainer" "single") }}-{{ $root.Values.device }}{{ end -}}
{{- end -}}
{{- end }}

{{/* single: server and trainer run in one container; pair: in two containers of one pod; apart: in two pods. */}}
{{- define "grpo.layout" -}}
{{- if ne .Values.mode "shared_vllm" }}apart{{ else if eq .Values.gpu.sharing "dra" }}pair{{ else }}single{{ end -}}
{{- end }}

{{/* The tiny model's directory, a directory or an id on the hub. */}}
{{- define "grpo.model" -}}
{{ .Values.model.name | default "/models/tiny" }}
{{- end }}

{{- define "grpo.dtype" -}}
{{ .Values.run.dtype | default (ternary "bfloat16" "float32" (eq .Values.device "gpu")) }}
{{- end }}

{{- define "grpo.lora" -}}
{{- if has .Values.mode (list "lora_only" "lora_restart") }}true{{ end -}}
{{- end }}

{{- define "grpo.checkpointsClaim" -}}
{{ .Values.persistence.checkpoints.existingClaim | default (printf "%s-checkpoints" (include "grpo.name" .)) }}
{{- end }}

{{- define "grpo.modelsClaim" -}}
{{ .Values.persistence.models.existingClaim | default (printf "%s-models" (include "grpo.name" .)) }}
{{- end }}

{{/* A value as text. Helm reads large integers of a values file as floating-point numbers, such as 1e+06. */}}
{{- define "grpo.text" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- end }}

{{/* Bytes of a quantity, for example 8Gi. */}}
{{- define "grpo.bytes" -}}
{{- $units := dict "m" 0.001 "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000
      "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 }}
{{- mulf (regexFind "^[0-9.]+" . | float64) (get $units (regexFind "[A-Za-z]*$" .)) | int64 }}
{{- end }}

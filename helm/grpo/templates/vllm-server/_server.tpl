{{/* Options of vllm-api-server and vLLM, as a list. */}}
{{- define "grpo.serverArgs" -}}
{{- $args := list "--dtype" (include "grpo.dtype" .) "--max-model-len" .Values.vllmServer.maxModelLen "--max-num-seqs" .Values.vllmServer.maxNumSeqs }}
{{- $args = concat $args (list "--seed" .Values.run.seed) }}
{{- if eq .Values.device "cpu" }}
{{- $args = concat $args (list "--enforce-eager" "--kv-cache-memory-bytes" "268435456") }}
{{- else if ne (include "grpo.layout" .) "apart" }}
{{- $args = concat $args (list "--gpu-memory-utilization" .Values.gpu.memoryUtilization) }}
{{- else if gt (int .Values.vllmServer.gpus) 1 }}
{{- $args = concat $args (list "--tensor-parallel-size" .Values.vllmServer.gpus) }}
{{- end }}
{{- range concat $args .Values.vllmServer.extraArgs }}
- {{ include "grpo.text" . | quote }}
{{- end }}
{{- end }}

{{/* The same options as one string, which is split like a shell's words. */}}
{{- define "grpo.serverFlags" -}}
{{- $words := list }}
{{- range include "grpo.serverArgs" . | fromYamlArray }}
{{- $words = append $words (regexMatch "^[A-Za-z0-9_./:=@,+-]+$" . | ternary . (printf "'%s'" (replace "'" "'\\''" .))) }}
{{- end }}
{{- join " " $words }}
{{- end }}

{{- define "grpo.serverEnv" -}}
{{- $env := dict
  "OMP_NUM_THREADS" .Values.cpuThreads
  "HF_HUB_OFFLINE" "1"
  "RUN_ID" (include "grpo.runId" .)
  "GRPO_VLLM_MODEL" (include "grpo.model" .)
  "GRPO_VLLM_HOST" "::"
  "GRPO_VLLM_RESTART_LIMIT" 3
  "GRPO_VLLM_REDIS_DEADLINE_S" 1800
  "GRPO_VLLM_ALLOWED_HOSTS" (printf "%s-vllm-server.%s" (include "grpo.name" .) .Release.Namespace)
}}
{{- if eq .Values.mode "shared_vllm" }}
{{- /* The control port listens on the pod's loopback address, so only the trainer can reach it. */}}
{{- $env = merge $env (dict
  "GRPO_VLLM_SHARE_WEIGHTS" true
  "GRPO_VLLM_WEIGHTS_SOCKET" "/share/weights/weights.sock"
  "GRPO_VLLM_BRIDGE_CONFIG_PATH" "/share/vllm_bridge_config.json"
  "GRPO_VLLM_CONTROL_PORT" 9002
) }}
{{- else }}
{{- /* The health port listens on this address for the kubelet. Without a control port, no route replaces weights. */}}
{{- $pod := printf "$(POD_NAME).%s-vllm-servers" (include "grpo.name" .) }}
{{- $env = merge $env (dict
  "GRPO_VLLM_WEIGHTS_DIR" "/checkpoints"
  "GRPO_VLLM_CONTROL_HOST" "::"
  "GRPO_VLLM_ADVERTISE_URL" (printf "http://%s:9001" $pod)
) }}
{{- $_ := set $env "GRPO_VLLM_ALLOWED_HOSTS" (printf "%s,%s" $env.GRPO_VLLM_ALLOWED_HOSTS $pod) }}
{{- end }}
{{- if include "grpo.lora" . }}
{{- $env = merge $env (dict
  "GRPO_VLLM_ENABLE_LORA" true
  "GRPO_VLLM_MAX_LORAS" 2
  "GRPO_VLLM_MAX_LORA_RANK" (include "grpo.maxLoraRank" .)
) }}
{{- end }}
{{- include "grpo.env" (list . $env "redis" "VLLM_API_KEY") }}
{{- end }}

{{/* vLLM accepts these ranks only; the smallest that is large enough. */}}
{{- define "grpo.maxLoraRank" -}}
{{- $found := "" }}
{{- range list 1 8 16 32 64 128 256 320 512 }}
{{- if and (not $found) (ge . (int $.Values.run.lora.r)) }}{{ $found = . | toString }}{{ end }}
{{- end }}
{{- $found }}
{{- end }}

{{/* The supervisor answers while the engine loads the model. The argument is "http", or "exec" if the health port
     listens on the loopback address. */}}
{{- define "grpo.serverReadiness" -}}
readinessProbe:
  {{- if eq . "exec" }}
  exec: {command: [python3, -m, grpo_core.clients.health_probe, "http://127.0.0.1:10001/readyz"]}
  {{- else }}
  httpGet: {path: /readyz, port: health}
  {{- end }}
  periodSeconds: 5
  timeoutSeconds: 10
{{- end }}

{{/* Fails when the supervisor has given up its engine. */}}
{{- define "grpo.serverLiveness" -}}
livenessProbe:
  {{- if eq . "exec" }}
  exec: {command: [python3, -m, grpo_core.clients.health_probe, "http://127.0.0.1:10001/healthz"]}
  {{- else }}
  httpGet: {path: /healthz, port: health}
  {{- end }}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 12
{{- end }}

{{/* The container of the inference server, without its GPU: (list . probes). */}}
{{- define "grpo.serverContainer" -}}
{{- $root := index . 0 -}}
name: vllm-server
image: {{ include "grpo.image" (list $root "vllm-server" $root.Values.vllmServer.image) }}
{{ include "grpo.containerDefaults" $root }}
args: {{- include "grpo.serverArgs" $root | trim | nindent 2 }}
env:
  {{- if eq (include "grpo.layout" $root) "apart" }}
  - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
  {{- end }}
  {{- include "grpo.serverEnv" $root | trim | nindent 2 }}
ports:
  - {name: http, containerPort: 9001}
  - {name: health, containerPort: 10001}
{{ include "grpo.serverReadiness" (index . 1) }}
{{ include "grpo.serverLiveness" (index . 1) }}
volumeMounts: {{- include "grpo.computeMounts" $root | nindent 2 }}
{{- end }}

{{/* Pod of the inference server in the modes that use two pods. */}}
{{- define "grpo.serverPod" -}}
metadata:
  labels:
    {{- include "grpo.labels" (list . "vllm-server") | nindent 4 }}
    grpo/volumes: "true"
    grpo/inference: "true"
  {{- with include "grpo.scraped" (list . 9001) }}
  {{- . | nindent 2 }}
  {{- end }}
spec:
  {{- include "grpo.podDefaults" (list . .Values.vllmServer "volumes" "gpu") | nindent 2 }}
  {{- if or .Values.vllmServer.autoscaling.enabled (gt (int .Values.vllmServer.replicas) 1) }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels: {{- include "grpo.selector" (list . "vllm-server") | nindent 10 }}
  {{- end }}
  terminationGracePeriodSeconds: 30
  initContainers:
    - {{ include "grpo.awaitModel" (list . (include "grpo.image" (list . "vllm-server" .Values.vllmServer.image))) | indent 6 | trim }}
  containers:
    - {{ include "grpo.serverContainer" (list . "http") | indent 6 | trim }}
      {{- include "grpo.resources" (list . .Values.vllmServer.resources (eq .Values.device "gpu" | ternary .Values.vllmServer.gpus 0) false) | nindent 6 }}
  volumes: {{- include "grpo.computeVolumes" . | nindent 4 }}
{{- end }}

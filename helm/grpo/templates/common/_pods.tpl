{{/* Parts that pods have in common. */}}

{{/* Fields of a pod's spec: (list . values-of-the-component features...). The features are "volumes" (the pod mounts the
     volumes for models or checkpoints) and "gpu". */}}
{{- define "grpo.podDefaults" -}}
{{- $root := index . 0 }}
{{- $component := index . 1 -}}
serviceAccountName: {{ include "grpo.name" $root }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  fsGroupChangePolicy: OnRootMismatch
  {{- with $component.seccompProfile }}
  seccompProfile: {{- toYaml . | nindent 4 }}
  {{- else }}
  seccompProfile: {type: RuntimeDefault}
  {{- end }}
  {{- with $component.appArmorProfile }}
  appArmorProfile: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- with $component.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $component.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- if and (has "gpu" .) (eq $root.Values.device "gpu") $root.Values.gpu.runtimeClassName }}
runtimeClassName: {{ $root.Values.gpu.runtimeClassName }}
{{- end }}
{{- if and (has "volumes" .) (eq $root.Values.persistence.accessMode "ReadWriteOnce") }}
# A ReadWriteOnce volume is mounted on one node, so all pods with this label are put on one node. The scheduler lets
# the first of these pods choose the node.
affinity:
  podAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels:
            app.kubernetes.io/instance: {{ $root.Release.Name }}
            grpo/volumes: "true"
{{- end }}
{{- end }}

{{- define "grpo.containerDefaults" -}}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* Annotations for a Prometheus that looks for them: (list . port). */}}
{{- define "grpo.scraped" -}}
{{- if (index . 0).Values.metrics.podAnnotations -}}
annotations: {prometheus.io/scrape: "true", prometheus.io/port: {{ index . 1 | quote }}, prometheus.io/path: /metrics}
{{- end }}
{{- end }}

{{/* Environment variables: (list . dict-of-values feature...). The features are "redis" (REDIS_URL), "RUN_API_TOKEN" and
     "VLLM_API_KEY". */}}
{{- define "grpo.env" -}}
{{- $root := index . 0 }}
{{- $values := index . 1 }}
{{- if and (has "redis" .) $root.Values.redis.enabled }}
{{- $_ := set $values "REDIS_URL" (printf "redis://%s-redis:6379/0" (include "grpo.name" $root)) }}
{{- end }}
{{- range $name, $value := $values }}
- {name: {{ $name }}, value: {{ include "grpo.text" $value | quote }}}
{{- end }}
{{- if and (has "redis" .) (not $root.Values.redis.enabled) }}
- name: REDIS_URL
  valueFrom: {secretKeyRef: {name: {{ $root.Values.redis.external.existingSecret }}, key: {{ $root.Values.redis.external.key }}}}
{{- end }}
{{- range $name := list "RUN_API_TOKEN" "VLLM_API_KEY" }}
{{- if and $root.Values.accessToken.existingSecret (has $name $) }}
- name: {{ $name }}
  valueFrom: {secretKeyRef: {name: {{ $root.Values.accessToken.existingSecret }}, key: {{ $root.Values.accessToken.key }}}}
{{- end }}
{{- end }}
{{- end }}

{{/* Resources of a container: (list . resources number-of-GPUs uses-the-pod's-claim). */}}
{{- define "grpo.resources" -}}
{{- $resources := deepCopy (index . 1) }}
{{- with index . 2 }}
{{- $resources = mergeOverwrite $resources (dict "limits" (dict (index $ 0).Values.gpu.resourceName .)) }}
{{- end }}
{{- if index . 3 }}
{{- $_ := set $resources "claims" (list (dict "name" "gpu")) }}
{{- end -}}
resources: {{- toYaml $resources | nindent 2 }}
{{- end }}

{{/* Volumes of a pod that loads the model. Triton loads compiled code from /tmp. */}}
{{- define "grpo.computeVolumes" -}}
- {name: tmp, emptyDir: {}}
- {name: share, emptyDir: {}}
- {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ .Values.shmSize }}}}
- name: models
  persistentVolumeClaim: {claimName: {{ include "grpo.modelsClaim" . }}}
- name: checkpoints
  persistentVolumeClaim: {claimName: {{ include "grpo.checkpointsClaim" . }}}
{{- with .Values.wandb.existingSecret }}
- name: wandb
  secret: {secretName: {{ . }}, items: [{key: {{ $.Values.wandb.key }}, path: wandb_api_key}]}
{{- end }}
{{- end }}

{{- define "grpo.computeMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: share, mountPath: /share}
- {name: shm, mountPath: /dev/shm}
- {name: models, mountPath: /models}
- {name: checkpoints, mountPath: /checkpoints}
{{- end }}

{{/* Waits until the Job "model" has provided the model: (list . image). */}}
{{- define "grpo.awaitModel" -}}
{{- $root := index . 0 -}}
name: await-model
image: {{ index . 1 }}
{{ include "grpo.containerDefaults" $root }}
command: [tini, --, sh, -c]
args:
  - |
    echo "waiting for the model; the Job {{ include "grpo.modelJobName" $root }} provides it"
    until [ -e /models/.ready/{{ include "grpo.modelHash" $root }} ]; do sleep 1; done
volumeMounts:
  - {name: models, mountPath: /models}
{{- end }}
